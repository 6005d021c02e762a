"""Temporary folders: removed by who made them, or once that was killed by the next process; never while in use."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from cluster.system.files import remove_abandoned, scratch_folder

HOLDS = """
import sys, time
from cluster.system.files import scratch_folder
with scratch_folder() as path:
    (path / "file").touch()
    print(path, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_removed_at_the_end_and_never_before(temporary_files):
    with scratch_folder() as first:
        with scratch_folder() as second:
            remove_abandoned()
            assert {first, second} == set(temporary_files.iterdir())
        assert [first] == list(temporary_files.iterdir())
    assert [] == list(temporary_files.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary_files):
    other = temporary_files / "tf-cluster-of-somebody-else"
    other.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        path = Path(process.stdout.readline().strip())
        remove_abandoned()
        assert (path / "file").exists()
        os.kill(process.pid, signal.SIGKILL)
    with scratch_folder() as mine:
        assert {mine, other} == set(temporary_files.iterdir())


def test_a_link_is_not_followed(temporary_files, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (temporary_files / "tf-cluster-tmp-link").symlink_to(elsewhere)
    remove_abandoned()
    assert (elsewhere / "file").exists()
