"""The failure policy as a table: what an agent knows, and what it does then."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.agent.decide import (
    CULPRIT_PATIENCE_S,
    PEER_LOST_PATIENCE_S,
    SILENT_HINT_S,
    BareAction,
    EndRun,
    Facts,
    LeaveOut,
    MissedRendezvous,
    Phase,
    RestartAlone,
    RestartGang,
    decide,
)
from cluster.agent.watchdog import SILENT_S, Stall
from cluster.contract.recovery.attempt_limits import EXTERNAL, LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.recovery.ends import End
from cluster.contract.run.records import OutcomeState
from cluster.contract.spec import Role

KILLED = End("worker-0", EXTERNAL, "killed", None, 1.0)
ERROR = End("worker-0", PROGRAM_FAILURE, "exit code 1", "ValueError: a bug", 1.0)
LOST = End("worker-0", LOST_CONTACT, "lost contact", None, 1.0, may_follow=True)
FROZEN = Stall("worker-0", "no heartbeat for 8 s", "frozen")
SILENT = Stall("worker-1", "no heartbeat for 12 s", "silent")
HANG = Stall("worker-1", "no new step", "hang")
CONTINUATION = LeaveOut(frozenset({"worker-1"}), KILLED)
STOPPED = EndRun(OutcomeState.STOPPED)
SUCCEEDED = EndRun(OutcomeState.SUCCEEDED)


def failed(code: int, error: str, task: str = "") -> EndRun:
    return EndRun(OutcomeState.FAILED, task, {"exit_code": code, "error": error})


def facts(phase: Phase, **known: Any) -> Facts:
    return Facts(phase=phase, **{"end": ERROR} | known)


@pytest.mark.parametrize("phase", Phase)
def test_after_the_end_of_a_run_or_generation_nothing_is_decided(phase):
    assert BareAction.LEAVE == decide(facts(phase, is_over=True, code=1, finding=FROZEN, stop_requested=True))


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({}, BareAction.CONTINUE),
        ({"pause_is_over": True}, BareAction.START),
        ({"stop_requested": True}, STOPPED),
        ({"stop_requested": True, "is_unsaved": True}, BareAction.START),
        ({"stop_requested": True, "role": Role.EVALUATOR, "restarts_alone": True}, BareAction.CONTINUE),
        ({"stop_requested": True, "restarts_alone": True}, BareAction.START),  # the chief saves with its help
        ({"role": Role.EVALUATOR, "chief_done_s": SILENT_S + 0.1, "chief_state": "done"}, SUCCEEDED),
        ({"role": Role.EVALUATOR, "chief_done_s": SILENT_S + 0.1, "chief_state": "stopped"}, STOPPED),
    ],
)
def test_while_a_program_waits_to_start_again(known, action):
    assert action == decide(facts(Phase.PAUSED, **known))


@pytest.mark.parametrize(
    ("missed", "action"),
    [
        ({}, failed(4, "missing worker-1")),
        ({"task": "worker-1"}, failed(4, "missing worker-1", "worker-1")),
        ({"task": "worker-1", "is_queued_again": True}, BareAction.QUEUE_AGAIN),
        ({"task": "worker-1", "is_queued_again": True, "continuation": CONTINUATION}, CONTINUATION),
    ],
)
def test_after_a_rendezvous_that_tasks_missed(missed, action):
    known = facts(Phase.INCOMPLETE, missed=MissedRendezvous("missing worker-1", 4, **missed))
    assert action == decide(known)
    assert (action if action is CONTINUATION else STOPPED) == decide(replace(known, stop_requested=True))


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({}, BareAction.CONTINUE),
        ({"stop_requested": True}, BareAction.REQUEST_END),
        ({"stop_requested": True, "role": Role.EVALUATOR}, BareAction.CONTINUE),
        ({"stop_requested": True, "serves": True}, BareAction.CONTINUE),
        ({"stop_requested": True, "scripted": True}, BareAction.REQUEST_END),
        ({"stop_requested": True, "scripted": True, "grace_is_over": True}, STOPPED),
        ({"stop_requested": True, "grace_is_over": True}, BareAction.REQUEST_END),
        ({"stop_requested": True, "phase": Phase.STARTING}, STOPPED),
        ({"stop_requested": True, "is_unsaved": True, "phase": Phase.STARTING}, BareAction.REQUEST_END),
        ({"serves": True, "chief_done_s": SILENT_S, "chief_state": "done"}, BareAction.CONTINUE),
        ({"serves": True, "chief_done_s": SILENT_S + 0.1, "chief_state": "done"}, SUCCEEDED),
        ({"serves": True, "chief_done_s": SILENT_S + 0.1, "chief_state": "stopped"}, STOPPED),
        ({"role": Role.EVALUATOR, "chief_done_s": SILENT_S + 0.1, "chief_state": "done"}, SUCCEEDED),
        ({"finding": FROZEN}, RestartGang(ERROR)),
        ({"finding": HANG}, RestartGang(ERROR)),
        ({"finding": SILENT}, RestartGang(ERROR)),
        ({"finding": FROZEN, "restarts_alone": True}, RestartAlone(ERROR)),
        ({"finding": SILENT, "restarts_alone": True}, RestartGang(ERROR)),
        ({"finding": SILENT, "stop_requested": True}, EndRun(OutcomeState.STOPPED, "worker-1")),
        ({"finding": SILENT, "stop_requested": True, "is_unsaved": True}, RestartGang(ERROR)),
        ({"finding": Stall("chief", "no task joined", "late")}, failed(4, "no task joined", "chief")),
        ({"finding": FROZEN, "phase": Phase.STARTING}, RestartGang(ERROR)),
    ],
)
def test_while_the_program_runs(known, action):
    assert action == decide(facts(**{"phase": Phase.RUNNING} | known))


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({"code": 0, "state": "done"}, BareAction.AWAIT_OUTCOME),
        ({"code": -11, "state": "done"}, BareAction.AWAIT_OUTCOME),  # TensorFlow's teardown failed
        ({"code": 0, "state": "stopped"}, BareAction.AWAIT_OUTCOME),
        ({"code": 0, "state": "training"}, BareAction.REPORT_FAILURE),  # user code called exit
        ({"code": 1}, failed(1, "ValueError: a bug")),
        ({"code": 4, "restarts_alone": True}, failed(4, "ValueError: a bug")),
        ({"code": 1, "role": Role.EVALUATOR, "restarts_alone": True}, RestartAlone(ERROR)),
        ({"code": 70}, BareAction.REPORT_FAILURE),
        ({"code": 75}, BareAction.REPORT_FAILURE),
        ({"code": -9}, BareAction.REPORT_FAILURE),
        ({"code": -9, "phase": Phase.STARTING}, BareAction.REPORT_FAILURE),
        ({"code": -9, "stop_requested": True}, STOPPED),
        ({"code": -9, "stop_requested": True, "is_unsaved": True}, BareAction.REPORT_FAILURE),
        ({"code": -9, "restarts_alone": True}, RestartAlone(ERROR)),
        ({"code": -9, "restarts_alone": True, "stop_requested": True}, RestartAlone(ERROR)),
        (
            {"code": -9, "role": Role.EVALUATOR, "restarts_alone": True, "stop_requested": True},
            BareAction.AWAIT_OUTCOME,
        ),
    ],
)
def test_when_a_training_program_has_ended(known, action):
    assert action == decide(facts(**{"phase": Phase.RUNNING} | known))


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({"code": 0}, BareAction.AWAIT_OUTCOME),
        ({"code": 0, "stop_requested": True}, STOPPED),
        ({"code": 1}, BareAction.AWAIT_REPORTS),
        ({"code": 75, "restarts_alone": True}, BareAction.AWAIT_REPORTS),
        ({"code": -6}, BareAction.REPORT_FAILURE),
        ({"code": -6, "others_failed": True}, BareAction.AWAIT_REPORTS),  # TensorFlow aborts when another task failed
        ({"code": -9, "others_failed": True}, BareAction.REPORT_FAILURE),
        ({"code": -9, "restarts_alone": True}, RestartAlone(ERROR)),
    ],
)
def test_when_a_script_has_ended(known, action):
    assert action == decide(facts(Phase.RUNNING, scripted=True, **known))


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({}, BareAction.REPORT_FAILURE),
        ({"state": "done"}, BareAction.AWAIT_OUTCOME),
        ({"state": "stopped"}, BareAction.AWAIT_OUTCOME),
        ({"stop_requested": True}, STOPPED),
        ({"stop_requested": True, "is_unsaved": True}, BareAction.REPORT_FAILURE),
        ({"restarts_alone": True}, RestartAlone(KILLED)),
        ({"restarts_alone": True, "stop_requested": True}, RestartAlone(KILLED)),
    ],
)
@pytest.mark.parametrize("scripted", [False, True])
def test_when_the_whole_task_was_killed(known, action, scripted):
    assert action == decide(facts(Phase.DIED, end=KILLED, scripted=scripted, **known))


@pytest.mark.parametrize(
    ("end", "known", "action"),
    [
        (KILLED, {}, RestartGang(KILLED)),
        (ERROR, {"failed_s": CULPRIT_PATIENCE_S}, BareAction.CONTINUE),
        (ERROR, {"failed_s": CULPRIT_PATIENCE_S + 0.1}, RestartGang(ERROR)),
        (ERROR, {"has_peers": False}, RestartGang(ERROR)),
        (LOST, {"failed_s": PEER_LOST_PATIENCE_S}, BareAction.CONTINUE),
        (LOST, {"failed_s": PEER_LOST_PATIENCE_S + 0.1}, RestartGang(LOST)),
        (LOST, {"failed_s": 9.0, "silent_s": SILENT_HINT_S + 0.1}, BareAction.CONTINUE),
        (LOST, {"failed_s": 9.0, "finding": SILENT}, RestartGang(LOST)),
        (LOST, {"stop_requested": True}, STOPPED),
        (LOST, {"stop_requested": True, "is_unsaved": True, "failed_s": 9.0}, RestartGang(LOST)),
    ],
)
def test_a_task_that_failed_before_gets_time_to_report_that(end, known, action):
    assert action == decide(facts(Phase.FAILED, end=end, code=-9, **known))


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({"failed_s": 3.0}, BareAction.CONTINUE),
        ({"failed_s": 3.1}, failed(1, "exit code 1: ValueError: a bug")),
        ({"failed_s": 3.1, "others_failed": True}, BareAction.CONTINUE),
        ({"failed_s": 3.1, "all_are_alive": False}, BareAction.CONTINUE),
        ({"failed_s": 6.0, "last_silence_s": 5.0}, BareAction.CONTINUE),
        ({"failed_s": 8.1, "last_silence_s": 5.0}, failed(1, "exit code 1: ValueError: a bug")),
        ({"failed_s": SILENT_S + 3.1, "last_silence_s": 100.0}, failed(1, "exit code 1: ValueError: a bug")),
        ({"failed_s": 3.1, "stop_requested": True}, STOPPED),
    ],
)
def test_a_script_s_own_error_ends_the_run_only_when_all_others_are_alive(known, action):
    assert action == decide(facts(Phase.FAILED, scripted=True, code=1, **known))


@pytest.mark.parametrize(
    ("known", "cause"),
    [({"another_died": True}, "exit code 1"), ({"worker_restarted": True}, "exit code 1, after a worker had died")],
)
def test_a_script_s_error_after_the_death_of_another_task_restarts_the_gang(known, cause):
    action = decide(facts(Phase.FAILED, scripted=True, code=1, failed_s=3.1, **known))
    assert isinstance(action, RestartGang)
    assert (LOST_CONTACT, cause) == (action.end.kind, action.end.cause)


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({"role": Role.CHIEF, "state": "done"}, SUCCEEDED),
        ({"role": Role.CHIEF, "state": "stopped"}, STOPPED),
        ({"role": Role.CHIEF, "state": "stopped", "stop_withdrawn": True}, BareAction.RESUME),
        ({"state": "done"}, BareAction.CONTINUE),
        ({"state": "done", "chief_done_s": SILENT_S + 0.1}, SUCCEEDED),
        ({"state": "done", "finding": SILENT}, RestartGang(ERROR)),
        ({"role": Role.CHIEF, "scripted": True}, BareAction.CONTINUE),
        ({"role": Role.CHIEF, "scripted": True, "all_are_done": True}, SUCCEEDED),
        ({"role": Role.CHIEF, "scripted": True, "all_are_done": True, "stop_requested": True}, STOPPED),
        ({"scripted": True, "all_are_done": True}, BareAction.CONTINUE),
    ],
)
def test_when_the_work_is_done_one_agent_records_the_outcome(known, action):
    assert action == decide(facts(Phase.DONE, **known))
