"""The base's Debian packages: a rebuild is held to the versions on record."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.host.image import base_packages, images
from cluster.system.errors import PrerequisiteError
from cluster.system.paths import ROOT

LISTED = "bash 5.2\nlibc6 2.36\n"


@pytest.fixture
def record(tmp_path, monkeypatch) -> Path:
    """The versions on record, in a file of the test."""
    monkeypatch.setattr(base_packages, "ROOT", tmp_path)
    monkeypatch.setattr(base_packages, "RECORD", tmp_path / "docker" / "base-packages.txt")
    (tmp_path / "docker").mkdir()
    base_packages.RECORD.write_text(LISTED)
    return base_packages.RECORD


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (LISTED, []),
        ("bash 5.2\nlibc6 2.37\n", ["1 package: libc6 2.37 instead of 2.36;"]),
        ("bash 5.2\n", ["libc6 missing instead of 2.36"]),
        (f"{LISTED}zlib 1\n", ["zlib 1 instead of none"]),
        ("a 1\nb 2\n", ["4 packages: ", " and 1 more; "]),
    ],
)
def test_each_difference_is_named_in_one_line(record, installed, message):
    found = base_packages.difference(installed, LISTED)
    assert bool(message) is bool(found)
    assert all(each in found for each in message)
    assert "\n" not in found
    assert not found or base_packages.RENEW in found


def test_other_packages_are_refused_until_they_are_recorded(record, docker):
    calls = docker("echo libc6 2.36; echo bash 5.3")
    with pytest.raises(PrerequisiteError, match=r"bash 5\.3 instead of 5\.2"):
        base_packages.check()
    base_packages.renew()
    base_packages.check()
    assert "bash 5.3\nlibc6 2.36\n" == record.read_text()
    assert f"run --rm --network=none --entrypoint=dpkg-query {images.DEBIAN_BASE} --show " in calls.read_text()


def test_a_base_that_cannot_be_read_is_reported(record, docker):
    docker("echo no such image >&2; exit 1")
    with pytest.raises(PrerequisiteError, match="no such image"):
        base_packages.renew()
    assert record.read_text() == LISTED


def test_up_continues_with_a_warning(docker):
    docker("echo bash 0")
    command = [sys.executable, "-m", "cluster.host.image.base_packages"]
    assert command == shlex.split(images.base_commands()[-1])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (0, "", 1) == (done.returncode, done.stdout, done.stderr.count("\n"))
    assert done.stderr.startswith("warning: ")


def test_the_record_lists_the_packages_of_the_base():
    listed = dict(line.split(" ") for line in base_packages.RECORD.read_text().splitlines())
    assert {"python3.11", "ca-certificates", "libc6", "dpkg"} <= listed.keys()
