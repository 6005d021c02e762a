"""The record of the true step: exact after a SIGKILL, whole however it is read, and of one generation."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.contract.recovery import step_record
from cluster.contract.recovery.step_record import RecordedStep, StepRecord


def test_the_newest_step_outlives_a_sigkill(run):
    lines = f"""
import os
from cluster.contract.recovery.step_record import StepRecord
from cluster.contract.run.folder import RunFolder
from pathlib import Path
record = StepRecord(RunFolder(Path({str(run.path)!r})), "chief", 3)
for step in range(12346):
    record.done(step)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    done = subprocess.run([sys.executable, "-c", lines], check=False, cwd=Path(__file__).parents[4])
    assert -signal.SIGKILL == done.returncode
    assert RecordedStep(3, 12345) == step_record.read_step(run, "chief")
    assert 12345 == step_record.last_step(run, "chief", 3) == step_record.newest_step(run, 3)
    assert -1 == step_record.last_step(run, "chief", 4)


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 40, b"         1", b"         1                   12 00000000\n", b"x y z"]
)
def test_a_torn_record_is_none(run, damage):
    StepRecord(run, "chief", 1).done(12)
    path = run.control / "steps" / "chief"
    path.write_bytes(damage)
    assert step_record.read_step(run, "chief") is None
    StepRecord(run, "chief", 1).done(13)
    if len(damage) <= 40:
        assert RecordedStep(1, 13) == step_record.read_step(run, "chief")


def test_a_record_that_cannot_be_written_ends_nothing(run):
    (run.control / "steps").write_text("in the way")
    StepRecord(run, "chief", 1).done(12)
    assert step_record.read_step(run, "chief") is None


def test_single_steps_are_those_after_the_last_recorded_one(run):
    assert (None, -1) == (step_record.read_step(run, "chief"), step_record.newest_step(run, 0))
    assert range(0) == step_record.single_steps(run, 0, 25)
    assert range(26, 51) == step_record.single_steps(run, 1, 25, lambda mine: [mine, 26])  # others see it already
    run.begin_generation(1, task="chief", single_steps_from=26)
    assert range(26, 51) == step_record.single_steps(run, 1, 25)
