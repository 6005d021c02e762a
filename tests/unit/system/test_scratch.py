"""Temporary folders: removed by who made them, or once that was killed by the next process; never while in use."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.system.files import remove_abandoned, scratch_folder

HOLDS = """
import sys, time
from cluster.system.files import scratch_folder
with scratch_folder() as path:
    (path / "file").touch()
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def tmpdir(tmp_path, monkeypatch) -> Path:
    """The folder of temporary files, which only this test uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_removed_at_the_end_and_never_before(tmpdir):
    with scratch_folder() as first:
        with scratch_folder() as second:
            remove_abandoned()
            assert {first, second} == set(tmpdir.iterdir())
        assert [first] == list(tmpdir.iterdir())
    assert [] == list(tmpdir.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmpdir):
    other = tmpdir / "tf-cluster-of-somebody-else"
    other.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        path = Path(process.stdout.readline().strip())
        remove_abandoned()
        assert (path / "file").exists()
        os.kill(process.pid, signal.SIGKILL)
    with scratch_folder() as mine:
        assert {mine, other} == set(tmpdir.iterdir())


def test_a_link_is_not_followed(tmpdir, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (tmpdir / "tf-cluster-tmp-link").symlink_to(elsewhere)
    remove_abandoned()
    assert (elsewhere / "file").exists()
