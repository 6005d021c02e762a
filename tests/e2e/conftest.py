"""Fixtures of the scenarios: real commands, real processes, real containers."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fast
from tests.e2e.scenario import DATA, IMAGES, ROOT, Clusters

AT_THEIR_DEFAULTS = ("STANDBY", "STANDBY_DELAY_S", "RESTART_PAUSE_S")
"""Variables that runs do not inherit: a test that needs another value passes it to its commands."""


@pytest.fixture(scope="session", autouse=True)
def defaults():
    """The defaults for fixtures of a module, which are made before those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in AT_THEIR_DEFAULTS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def environment(isolation, monkeypatch):
    """The defaults again, which `isolation` changes, and the images of the tests, also in pytest's own process."""
    for name in AT_THEIR_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in IMAGES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def data() -> Path:
    """Fashion-MNIST, prepared once for all runs of the tests."""
    fast.leave_out("starts a cluster")
    subprocess.run([sys.executable, "-m", "train.data", "prepare", "--data-dir", str(DATA)], cwd=ROOT, check=True)
    return DATA


@pytest.fixture(scope="module")
def clusters(data, tmp_path_factory) -> Iterator[Clusters]:
    """Commands on a fresh folder of runs; what they leave behind is ended, and that nothing is left is checked."""
    cluster = Clusters(tmp_path_factory.mktemp("runs"))
    yield cluster
    cluster.down()


@pytest.fixture
def small(data, mount_disk) -> Clusters:
    """Commands on a folder of runs that is a small disk, to be filled."""
    return Clusters(mount_disk("560m"))


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Both images, built from this checkout with the project's own task, by one process of pytest after the other."""
    with (tmp_path_factory.getbasetemp().parent / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(
            [sys.executable, "-m", "invoke", "image.build"], cwd=ROOT, env=os.environ | IMAGES, check=True, timeout=900
        )
