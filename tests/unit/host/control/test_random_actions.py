"""Random commands from two terminals, many of them killed: every run folder is usable, and nothing is left over."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.system.paths import ROOT
from tests import fast


def act(folder: Path, seed: int, actions: int) -> None:
    command = [sys.executable, "-m", "tests.programs.random_actions", str(folder), str(seed), str(actions)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert 0 == done.returncode, done.stderr


def test_whatever_is_done_to_runs_leaves_them_usable_and_nothing_else(tmp_path):
    fast.leave_out("starts clusters")
    act(tmp_path / "actions", seed=1, actions=24)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_thousand_actions_leave_runs_usable_and_nothing_else(tmp_path, seed):
    act(tmp_path / "actions", seed, actions=1000)
