"""The failure policy: a pure function from facts to the next action. `attempt.py` observes, `agent.py` acts.

    chief, worker (synchronous), ps           a new generation: every agent restarts its program
    worker (parameter server), evaluator      only that program restarts
    frozen, or no new step                    treated as a death; see cluster/agent/watchdog.py
    exit code 1 to 4 of a training program    another attempt would be useless: the run fails; only an evaluator
                                              restarts nevertheless, with exponential back-off
    any other failure without progress        the run fails after `--max-restarts` restarts; see `Restarter`

A script does not know our exit codes. Exit code 0 means that its work is done; the run succeeds once every training
script has exited with 0. A script that crashed or was killed by a signal restarts. Any other code is the script's own
error, which another attempt would repeat, so the run fails. But when a task is killed, the scripts of the other tasks
fail as well, so their agents first give the task that really died time to report its death.
"""

import signal
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from cluster.agent.watchdog import SILENT_S, Stall
from cluster.contract.recovery.attempt_limits import LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.recovery.ends import End
from cluster.contract.run.records import OutcomeState, TaskState
from cluster.contract.spec import Role
from cluster.system.errors import EXIT_FAILED, EXIT_TIMEOUT

PEER_LOST_PATIENCE_S = 3.0
"""How long a task that lost contact waits for the task that really died to report its death."""
CULPRIT_PATIENCE_S = 1.0
"""How long a task that failed by itself waits for a slower agent to report an earlier failure."""
SILENT_HINT_S = 2.0
"""Age of a heartbeat from which its task may have died together with its agent and not been restarted yet.

Well below `PEER_LOST_PATIENCE_S`: a heartbeat is due every second, and may be read half a second late.
"""


class Phase(Enum):
    """The phase of an attempt.

    PAUSED -> STARTING -> RUNNING -> FAILED or DONE
              STARTING -> INCOMPLETE
              DIED                -> FAILED or DONE
    """

    PAUSED = auto()
    """The program failed by itself, and its restart is delayed by the back-off."""
    STARTING = auto()
    """The program has not joined its cluster yet, so it has nothing to save."""
    INCOMPLETE = auto()
    """The rendezvous could not be held, or other tasks missed it."""
    RUNNING = auto()
    FAILED = auto()
    """The program has failed; a task that failed earlier gets time to report its failure."""
    DONE = auto()
    """The program's work is done, and the run's outcome is about to be recorded."""
    DIED = auto()
    """The agent has been restarted after the whole task was killed."""


@dataclass(frozen=True)
class LeaveOut:
    """Begin the next generation without these tasks."""

    tasks: frozenset[str]
    end: End


@dataclass(frozen=True)
class MissedRendezvous:
    """A rendezvous that tasks missed, or that this task could not hold."""

    error: str
    exit_code: int
    task: str = ""
    """The missing task to report; empty for the agent's own task."""
    continuation: LeaveOut | None = None
    """How the run continues without the missing tasks; None if it needs them, or if another agent decides."""
    is_queued_again: bool = False
    """Whether the run's job is queued again."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An agent's observations at one moment. Facts that are irrelevant in the current phase keep their defaults."""

    phase: Phase
    role: Role = Role.WORKER
    scripted: bool = False
    restarts_alone: bool = False
    serves: bool = False
    """Whether the program is a server that runs until the other tasks are done."""
    has_peers: bool = True
    is_over: bool = False
    """Whether the run has an outcome or a newer generation has begun."""
    stop_requested: bool = False
    is_unsaved: bool = False
    """Whether a stop waits for a restart after a failure, which saves the steps that are only in memory."""
    pause_is_over: bool = False
    missed: MissedRendezvous | None = None
    grace_is_over: bool = False
    """Whether a script's grace period after a request to end is over."""
    state: str = ""
    """The state in the task's newest heartbeat."""

    finding: Stall | None = None
    code: int | None = None
    """The exit code of the program, negative for a signal; None while it runs."""
    end: End | None = None
    """The failure to act on: the program's, or that of the task named in `finding`."""

    others_failed: bool = False
    """Whether the script of another task had failed when this one ended."""
    failed_s: float = 0.0
    """Seconds since the failure."""
    silent_s: float = 0.0
    """Seconds since the last heartbeat of the task that has been silent longest."""
    last_silence_s: float = 0.0
    """Seconds from the failure until another task was last found silent."""
    all_are_alive: bool = True
    another_died: bool = False
    """Whether another task has reported that it was killed or crashed."""
    worker_restarted: bool = False
    """Whether a worker of parameter servers was restarted alone shortly before."""

    chief_done_s: float = 0.0
    """For how many seconds the chief's work has been done without a recorded outcome."""
    chief_state: str = ""
    """The final state of the chief's work."""
    all_are_done: bool = False
    """Whether every training script has exited with 0."""
    stop_withdrawn: bool = False


class BareAction(Enum):
    """An action without parameters."""

    START = auto()
    LEAVE = auto()
    """End the attempt: nothing is left to decide in this generation."""
    CONTINUE = auto()
    """Observe again in a moment."""
    REQUEST_END = auto()
    """Ask the program to save and end."""
    AWAIT_OUTCOME = auto()
    """Enter the phase DONE."""
    REPORT_FAILURE = auto()
    """Report the failure to the other tasks, whose failures it may have caused, and enter the phase FAILED."""
    AWAIT_REPORTS = auto()
    """Enter the phase FAILED."""
    RESUME = auto()
    """Begin the next generation after the tasks have saved for a stop request that was then withdrawn."""
    QUEUE_AGAIN = auto()
    """Stop the run until its job has nodes again."""


@dataclass(frozen=True)
class RestartAlone:
    """Restart only this task's program, unless it has failed too often."""

    end: End


@dataclass(frozen=True)
class RestartGang:
    """Restart every task by beginning the next generation, unless the run has failed too often."""

    end: End


@dataclass(frozen=True)
class EndRun:
    """Record the run's outcome; `task` defaults to the agent's own task."""

    state: OutcomeState
    task: str = ""
    failure: dict[str, Any] = field(default_factory=dict)
    """The exit code and the error of a run that failed."""


Action = BareAction | RestartAlone | RestartGang | LeaveOut | EndRun
STOP_RUN = EndRun(OutcomeState.STOPPED)


def decide(facts: Facts) -> Action:
    """Return the next action."""
    if facts.is_over:
        return BareAction.LEAVE  # another agent has decided
    if facts.phase is Phase.STARTING and _gives_up(facts):
        return STOP_RUN
    if facts.finding:
        return _after_finding(facts, facts.finding)
    if facts.chief_done_s > SILENT_S:  # the chief's agent is stuck, and this program may not end by itself
        return _when_done(facts)
    if facts.code is None and facts.phase in (Phase.STARTING, Phase.RUNNING):
        return _while_running(facts)
    return _POLICY[facts.phase](facts)


def _gives_up(facts: Facts) -> bool:
    """Whether a stop ends the run without the program."""
    return facts.stop_requested and not facts.is_unsaved


def _fail(exit_code: int, error: str, task: str = "") -> EndRun:
    return EndRun(OutcomeState.FAILED, task, {"exit_code": exit_code, "error": error})


def patience_s(facts: Facts) -> float:
    """Return for how many seconds to wait after a failure in case another task reports an earlier one."""
    assert facts.end
    if is_own_error(facts):
        return PEER_LOST_PATIENCE_S * (2 if facts.others_failed else 1)
    if facts.end.kind not in (PROGRAM_FAILURE, LOST_CONTACT) or not facts.has_peers:
        return 0.0
    return PEER_LOST_PATIENCE_S if facts.end.may_follow else CULPRIT_PATIENCE_S


def is_own_error(facts: Facts) -> bool:
    """Whether a script exited with an error, or was aborted by TensorFlow after another script had failed."""
    if not facts.scripted or facts.code is None:
        return False
    return facts.code > 0 or (facts.code == -signal.SIGABRT and facts.others_failed)


def records_outcome(facts: Facts) -> bool:
    """Whether this agent records the outcome: the chief's does, or any other if the chief's agent is stuck."""
    return facts.role == Role.CHIEF or facts.chief_done_s > SILENT_S


def _while_paused(facts: Facts) -> Action:
    if not facts.stop_requested:
        return BareAction.START if facts.pause_is_over else BareAction.CONTINUE
    if facts.role.is_sidecar:
        return BareAction.CONTINUE  # it has nothing to save
    # The chief of parameter servers saves with a worker's help.
    return STOP_RUN if _gives_up(facts) and not facts.restarts_alone else BareAction.START


def _after_missed_rendezvous(facts: Facts) -> Action:
    assert facts.missed
    if facts.missed.continuation:
        return facts.missed.continuation
    if facts.stop_requested:
        return STOP_RUN
    if facts.missed.is_queued_again:
        return BareAction.QUEUE_AGAIN
    return _fail(facts.missed.exit_code, facts.missed.error, facts.missed.task)


def _while_running(facts: Facts) -> Action:
    # An evaluator ends after the run, whose last checkpoint it evaluates.
    if facts.stop_requested and not facts.serves and facts.role != Role.EVALUATOR:
        # A training program may take as long as it needs to save.
        return STOP_RUN if facts.scripted and facts.grace_is_over else BareAction.REQUEST_END
    return BareAction.CONTINUE


def _after_finding(facts: Facts, finding: Stall) -> Action:
    if finding.kind == "late":
        return _fail(EXIT_TIMEOUT, finding.cause, finding.task)
    assert facts.end
    if facts.restarts_alone and finding.kind != "silent":
        return RestartAlone(facts.end)
    if _gives_up(facts):
        return EndRun(OutcomeState.STOPPED, finding.task)
    return RestartGang(facts.end)


def _after_program(facts: Facts) -> Action:
    assert facts.end
    assert facts.code is not None
    if facts.scripted:
        return _after_script(facts, facts.end)
    if facts.state in (TaskState.DONE, TaskState.STOPPED) or (facts.role.is_sidecar and facts.stop_requested):
        # The program reports whether it was done: any user code can end it with exit code 0, and TensorFlow's teardown
        # can fail after the work was done.
        return BareAction.AWAIT_OUTCOME
    if EXIT_FAILED <= facts.code <= EXIT_TIMEOUT and facts.role != Role.EVALUATOR:
        return _fail(facts.code, facts.end.reported)
    if facts.restarts_alone:
        return RestartAlone(facts.end)  # even during a stop: the chief needs its workers to save
    return STOP_RUN if _gives_up(facts) else BareAction.REPORT_FAILURE


def _after_script(facts: Facts, end: End) -> Action:
    if facts.stop_requested:
        return STOP_RUN
    if facts.code == 0:
        return BareAction.AWAIT_OUTCOME
    if is_own_error(facts):
        return BareAction.AWAIT_REPORTS
    return RestartAlone(end) if facts.restarts_alone else BareAction.REPORT_FAILURE


def _after_death(facts: Facts) -> Action:
    assert facts.end
    if facts.state in (TaskState.DONE, TaskState.STOPPED):
        return BareAction.AWAIT_OUTCOME
    if facts.restarts_alone:
        return RestartAlone(facts.end)
    return STOP_RUN if _gives_up(facts) else BareAction.REPORT_FAILURE


def _after_failure(facts: Facts) -> Action:
    """Return the response to a failure of this task, which another task's earlier failure may have caused.

    A task that was killed together with its agent reports this after its restart; a task that stays silent caused the
    failure. A script's own error would end the run, so it counts only once all other tasks are known to be alive.
    """
    assert facts.end
    if _gives_up(facts):
        return STOP_RUN
    if patience := patience_s(facts):
        if facts.scripted:  # a task that sends heartbeats again gets as long to report
            patience += min(facts.last_silence_s, SILENT_S)
        is_waiting = facts.failed_s <= patience or (facts.scripted and not facts.all_are_alive)
        if facts.silent_s > SILENT_HINT_S or is_waiting:
            return BareAction.CONTINUE
    if not is_own_error(facts) or facts.another_died:
        return RestartGang(replace(facts.end, kind=LOST_CONTACT if is_own_error(facts) else facts.end.kind))
    if facts.worker_restarted:
        return RestartGang(replace(facts.end, kind=LOST_CONTACT, cause=f"{facts.end.cause}, after a worker had died"))
    end = facts.end
    if not end.error or end.error.startswith(end.cause):
        return _fail(EXIT_FAILED, end.reported)
    return _fail(EXIT_FAILED, f"{end.cause}: {end.error}")  # the code first: only the script's author knows it


def _when_done(facts: Facts) -> Action:
    if not records_outcome(facts):
        return BareAction.CONTINUE
    if facts.scripted:
        if not facts.all_are_done:
            return BareAction.CONTINUE
        return STOP_RUN if facts.stop_requested else EndRun(OutcomeState.SUCCEEDED)
    if TaskState.STOPPED not in (facts.state, facts.chief_state):
        return EndRun(OutcomeState.SUCCEEDED)
    return BareAction.RESUME if facts.stop_withdrawn else STOP_RUN


_POLICY = {
    Phase.PAUSED: _while_paused,
    Phase.INCOMPLETE: _after_missed_rendezvous,
    Phase.STARTING: _after_program,
    Phase.RUNNING: _after_program,
    Phase.FAILED: _after_failure,
    Phase.DONE: _when_done,
    Phase.DIED: _after_death,
}
