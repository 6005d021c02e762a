"""How often what failed is started again: what counts, what progress is, its record, and that no storm ends a run."""

import signal
import subprocess
import sys

import pytest

from cluster.contract.recovery import attempt_limits, ends, step_record
from cluster.contract.recovery.attempt_limits import EXTERNAL, LOST_CONTACT, PROGRAM_FAILURE, EndedAttempt
from cluster.contract.recovery.step_record import RecordedStep, StepRecord
from cluster.system.files import ROOT
from tests.support.beats import restarter_of


def own(last_step: int, saved: int = -1) -> EndedAttempt:
    return EndedAttempt(PROGRAM_FAILURE, last_step, saved)


@pytest.mark.parametrize(
    ("tried", "count"),
    [
        ([own(26)], 1),
        ([own(26)] * 4, 4),
        ([own(-1)] * 3, 3),  # none came to a step
        ([own(20), own(26), own(26)], 2),  # a further step
        ([own(26), own(20, saved=10), own(22, saved=15)], 1),  # newer checkpoints, and other places
        ([own(26, saved=0), own(26, saved=10), own(26, saved=20)], 3),  # the very same place: no progress
        ([own(26), EndedAttempt(EXTERNAL, 5), EndedAttempt(EXTERNAL, 7), own(26)], 2),  # kills count for nothing
        ([own(26), EndedAttempt(EXTERNAL, 40), own(30)], 1),  # the run had reached a later step
        ([own(26), EndedAttempt(LOST_CONTACT, 26), own(26)], 2),
        ([EndedAttempt(EXTERNAL, 26)] * 9, 0),
        ([EndedAttempt(PROGRAM_FAILURE, runtime_s=1.0)] * 3, 3),
        ([EndedAttempt(PROGRAM_FAILURE, runtime_s=attempt_limits.STEADY_S + 1)] * 3, 1),  # a script that ran for long
    ],
)
def test_failures_are_counted_since_the_newest_progress(tried, count):
    assert count == attempt_limits.count_without_progress(tried)


MOST = attempt_limits.MAX_EXTERNAL_RESTARTS
KILLED = [EndedAttempt(EXTERNAL, 120, saved) for saved in range(100, 100 + MOST + 1)]
"""As by a memory watcher that kills at the same step again and again, while checkpoints are saved before it."""
LOST = [EndedAttempt(LOST_CONTACT, 5)] * (attempt_limits.MAX_LOST_CONTACTS + 1)


@pytest.mark.parametrize(
    ("tried", "limits", "count"),
    [
        ([own(5)], (0,), 1),
        ([own(5)], (1,), 0),
        ([own(5)] * 3, (3,), 0),
        ([own(5)] * 4, (3,), 4),
        # What others save does not count as progress of a task that does no step.
        ([own(26, 10), *(own(-1, saved) for saved in (27, 28, 29))], (3,), 4),
        (KILLED[:MOST], (3,), 0),
        (KILLED, (3,), MOST + 1),
        ([EndedAttempt(EXTERNAL, 5)] * 3, (3, 2), 3),
        ([*[EndedAttempt(EXTERNAL, 5)] * MOST, EndedAttempt(EXTERNAL, 6)], (3,), 0),  # a later step
        ([EndedAttempt(attempt_limits.PLANNED, 5)] * 50, (3,), 0),
        (LOST[1:], (3,), 0),
        (LOST, (3,), len(LOST)),  # a network that never carries ends the run late
    ],
)
def test_too_many_attempts_without_progress_end_the_run(tried, limits, count):
    assert count == attempt_limits.count_over_limit(tried, *limits)


def test_pauses_grow_to_a_bound_and_kills_have_none(monkeypatch):
    monkeypatch.setenv("RESTART_PAUSE_S", "1")
    assert [1, 2, 4, 8, 16, 30, 30, 30] == [attempt_limits.pause_s([own(5)] * (n + 1)) for n in range(8)]
    assert 0 == attempt_limits.pause_s([own(5), own(5), EndedAttempt(EXTERNAL, 5)])
    assert 30 == attempt_limits.pause_s([own(5)] * 5000)
    assert 1 == attempt_limits.pause_s([own(5), own(5), own(6)])


def test_failures_before_a_resume_do_not_count(run):
    for number in (1, 2):
        run.begin_generation(number, task="worker-0", cause="killed", kind=PROGRAM_FAILURE, last_step=5)
    run.event("worker-0", "restarted", kind=PROGRAM_FAILURE, last_step=5)
    assert [5, 5] == [attempt.last_step for attempt in attempt_limits.attempts_of_gang(run, 2)]
    assert 3 == attempt_limits.count_restarts(run, "worker-0")
    run.begin_generation(3, resumed=True)
    assert [] == attempt_limits.attempts_of_gang(run, 3) == attempt_limits.attempts_of_task(run, "worker-0")
    assert 0 == attempt_limits.count_restarts(run, "worker-0")


def test_two_tasks_that_fail_together_count_once(run):
    chief, worker = restarter_of(run), restarter_of(run, "worker-0")
    for generation in range(3):
        for recovery in (chief, worker):
            recovery.restart_gang(generation, recovery.end(generation, PROGRAM_FAILURE, "it died"))
    assert (3, None) == (run.generation, run.outcome)
    chief.restart_gang(3, chief.end(3, PROGRAM_FAILURE, "it died"))
    assert run.outcome is not None
    worker.restart_gang(3, worker.end(3, PROGRAM_FAILURE, "it died"))
    assert 3 == run.generation


def test_a_failure_before_any_step_leaves_it_where_the_next_attempts_go_step_by_step(make_run):
    run = make_run(workers=0)
    chief = restarter_of(run)
    chief.restart_gang(0, chief.end(0, PROGRAM_FAILURE, "a failure before the first step"))
    assert range(0) == step_record.single_steps(run, 1, 25)
    step_record.StepRecord(run, "chief", 1).done(26)
    chief.restart_gang(1, chief.end(1, PROGRAM_FAILURE, "step 27 failed"))
    for generation in (2, 3):
        assert range(26, 51) == step_record.single_steps(run, generation, 25)
        chief.restart_gang(generation, chief.end(generation, PROGRAM_FAILURE, "a failure before the first step"))
    assert (4, None) == (run.generation, run.outcome)


def test_the_culprit_is_the_task_that_failed_first(make_run):
    run = make_run(workers=3)
    first = ends.End("worker-1", PROGRAM_FAILURE, "exit code 139", "a crash", at=160.0)  # its clock is a minute ahead
    lost = ends.End("chief", LOST_CONTACT, "lost contact with the cluster", None, at=99.0, may_follow=True)
    aborted = ends.End("worker-0", PROGRAM_FAILURE, "exit code 134", None, at=99.5, may_follow=True)
    later = ends.End("worker-2", PROGRAM_FAILURE, "exit code 70", "InternalError", at=101.0)
    for end in (lost, aborted, first, later):
        ends.record_end(run, 0, end)
    assert first == ends.root_cause(run, 0, later)
    assert aborted == ends.root_cause(make_run("other", workers=3), 0, aborted)
    (run.control / "ends" / "0-worker-3.json").write_text("{")
    assert first == ends.root_cause(run, 0, lost)


def test_a_worker_of_parameter_servers_gets_somewhere_by_work_that_the_chief_saw(make_run):
    run = make_run(workers=2, ps=1)
    recovery = restarter_of(run, "worker-0")
    worked = step_record.StepRecord(run, "worker-0", 0)
    for step in (10, 20, 30, 40, 50, 60):
        recovery.restart_alone(recovery.end(0, PROGRAM_FAILURE, "it died"))
        worked.done(step)
    assert run.outcome is None
    for _ in range(4):
        step_record.StepRecord(run, "chief", 0).done(1000)  # the others' work
        recovery.restart_alone(recovery.end(0, PROGRAM_FAILURE, "it died"))
    assert run.outcome is not None
    assert ("failed", "worker-0") == (run.outcome.state, run.outcome.task)


def test_an_evaluator_never_fails_the_run(make_run):
    run = make_run(workers=0, evaluator=True)
    recovery = restarter_of(run, "evaluator")
    for _ in range(6):
        recovery.restart_alone(recovery.end(0, PROGRAM_FAILURE, "it died"))
    assert run.outcome is None


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
    assert -signal.SIGKILL == subprocess.run([sys.executable, "-c", lines], check=False, cwd=ROOT).returncode
    assert RecordedStep(3, 12345) == step_record.read_step(run, "chief")
    assert 12345 == step_record.last_step(run, "chief", 3) == step_record.newest_step(run, 3)
    assert -1 == step_record.last_step(run, "chief", 4)


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 40, b"         1", b"         1                   12 00000000\n", b"x y z"]
)
def test_a_torn_record_is_none(run, damage):
    StepRecord(run, "chief", 1).done(12)
    (run.control / "steps" / "chief").write_bytes(damage)
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
