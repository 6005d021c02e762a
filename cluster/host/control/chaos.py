"""Inject a fault into a run and measure its cost: `invoke chaos KIND TASK`.

A fault is an event in the run folder, so that the run's own summary counts from it; results go to `chaos.jsonl` there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from cluster.contract.recovery import restarts
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Restart
from cluster.contract.spec import Role
from cluster.host.control.faults import KINDS, STORM
from cluster.host.launch.teardown import in_progress
from cluster.host.runtime import registry
from cluster.host.runtime.injector import FaultInjector
from cluster.system.errors import TimedOut, UsageError, nearest
from cluster.system.json_files import append_json
from cluster.system.waiting import wait_until

SLOW_S = 10.0
"""How long a fault lasts that no other task acts on: one that only slows a task down, or any in a run of one task."""
RECOVERY_TIMEOUT_S = 300.0
POLL_S = 0.02
WORKING = ("training", "saving", "evaluating", "done", "stopped")


@dataclass(frozen=True)
class Fault:
    """A kind of fault, the task, and the earliest step."""

    kind: str
    task: str
    at_step: int = 0
    """The fault is injected once the run has done this many steps."""
    whole: bool = False
    """For `kill`: kill the task's agent, too, as when its container or machine dies."""

    def __str__(self) -> str:
        return f"{self.kind}{' --whole' if self.whole else ''} {self.task}"


@dataclass(frozen=True)
class Result:
    """What a fault cost; times in seconds from the fault."""

    kind: str
    task: str
    step: int
    """The newest step when the fault was injected."""
    detected_s: float | None
    """Until an agent acted on it; None if nothing had to be restarted."""
    resumed_s: float | None
    """Until the next new step, or the run's end; None for a script, which reports no steps."""
    steps_lost: int | None
    ended: str | None
    """How the run ended, if it did."""
    script_started_s: float | None = None
    """Until the processes of a script that had to be restarted had started."""

    @property
    def as_it_should(self) -> bool:
        """Whether the run continued, or ended as this fault requires."""
        return self.ended in KINDS[self.kind].ends

    @property
    def description(self) -> str:
        """The result in words."""
        if self.ended:
            return f"the run {self.ended} {self.resumed_s:.1f} s later"
        if self.detected_s is None:
            return f"nothing had to be started again; a new step {self.resumed_s:.2f} s later"
        if self.script_started_s is not None:
            return (
                f"noticed after {self.detected_s:.2f} s, the script's process started again after "
                f"{self.script_started_s:.2f} s; what it repeats is not known"
            )
        return (
            f"noticed after {self.detected_s:.2f} s, next new step after {self.resumed_s:.2f} s, "
            f"{self.steps_lost} steps done again"
        )


def check(run: RunFolder, fault: Fault) -> None:
    """Check that a fault can be injected into a run.

    Raises:
        UsageError: it cannot.
    """
    if fault.kind not in KINDS:
        raise UsageError(f"chaos {fault.kind!r} is no fault{nearest(fault.kind, [*KINDS, STORM])}")
    kind = KINDS[fault.kind]
    run.load_cluster().task(fault.task)
    if fault.whole and not kind.takes_whole:
        raise UsageError(f"--whole with {fault.kind}: it is for kill, which else kills the task's program alone")
    registry.of(run).faults(run).check(fault.kind, fault.task)
    if kind.needs_trainer and run.script:
        raise UsageError(f"{fault.kind} with a script: {kind.needs_trainer}")
    if not in_progress(run):
        raise UsageError(f"run {run.name!r} is not in progress; start one with `invoke up --detach`")


def inflict(run: RunFolder, fault: Fault, timeout_s: float = RECOVERY_TIMEOUT_S) -> Result:
    """Inject a fault, and return once the run has recovered or ended.

    Raises:
        UsageError: the run does not allow it.
        TimedOut: the run neither recovered nor ended.
    """
    injector = registry.of(run).faults(run)
    _await(lambda: _ready(run, fault), run, timeout_s, f"{fault.task} to train and step {fault.at_step}")
    if run.summary.exists():
        raise UsageError(f"run {run.name!r} ended before step {fault.at_step}; nothing was inflicted")
    before = _Before(run)
    try:
        _inject(run, injector, fault)
        if before.nobody_acts_on(fault):
            deadline = before.time + SLOW_S
            _await(lambda: time.time() > deadline, run, timeout_s, f"the end of {fault}")
            injector.undo(fault.task)
        elif KINDS[fault.kind].lasts:
            _await(lambda: before.noticed(fault), run, timeout_s, f"anybody to notice {fault}")
            injector.undo(fault.task)
        _await(lambda: before.recovered(fault), run, timeout_s, f"the run to recover from {fault}")
    finally:
        injector.undo(fault.task)
    result = before.result(fault)
    append_json(run.path / "chaos.jsonl", {"time": before.time, **asdict(result)})
    return result


class _Before:
    """The state of a run when a fault was injected, and what has happened since."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.time = time.time()
        self.step = run.newest_step
        self.generation = run.generation
        workers = [task.name for task in membership.cluster(run).of(Role.WORKER)]
        least = run.started.min_workers
        self._dispensable = workers if least is not None and len(workers) > least else []
        """The tasks without any one of which the run goes on."""

    def nobody_acts_on(self, fault: Fault) -> bool:
        """Whether a lasting fault is one for which no agent restarts the task."""
        alone = len(membership.cluster(self._run).tasks) == 1
        return KINDS[fault.kind].unnoticed or (KINDS[fault.kind].lasts and alone)

    def noticed(self, fault: Fault) -> bool:
        """Whether any agent has acted; in a run that goes on without the task, whether it does."""
        if KINDS[fault.kind].elastic and fault.task in self._dispensable:
            return fault.task in membership.left_out(self._run)
        acted = ("restarted", "frozen", "silent", "hang")
        recent = [e for e in self._run.events() if e.time > self.time and e.event in acted]
        return self._run.generation > self.generation or any(e.task == fault.task for e in recent)

    def costs(self) -> list[Restart]:
        alone = [Role.WORKER, *(role for role in Role if role.is_sidecar)]
        return restarts.costs(self._run, self.time, alone)

    def recovered(self, fault: Fault) -> bool:
        if self._run.summary.exists():
            return True
        if costs := self.costs():
            return costs[-1].resumed_s is not None or costs[-1].script_started_s is not None
        return self.nobody_acts_on(fault) and bool(self.new_step_after(self.time + SLOW_S))

    def new_step_after(self, moment: float) -> float | None:
        beats = self._run.heartbeats().values()
        times = [beat.updated_at for beat in beats if beat.step > self.step and beat.updated_at > moment]
        return min(times, default=None)

    def result(self, fault: Fault) -> Result:
        costs, ended = self.costs(), self._run.load_summary()
        resumed_s: float | None
        if ended:
            resumed_s = self._run.outcome.time - self.time if self._run.outcome else 0.0
        elif costs:
            resumed_s = costs[-1].resumed_s
        else:
            resumed_s = (self.new_step_after(self.time + SLOW_S) or time.time()) - self.time
        return Result(
            fault.kind,
            fault.task,
            self.step,
            costs[0].detected_s if costs else None,
            None if resumed_s is None else round(resumed_s, 3),
            None if self._run.script else sum(cost.steps_lost or 0 for cost in costs),
            ended.state if ended else None,
            costs[-1].script_started_s if costs else None,
        )


def _ready(run: RunFolder, fault: Fault) -> bool:
    beat = run.heartbeat(fault.task)
    begun = beat is not None and beat.state in WORKING and beat.generation == run.generation
    return begun and run.programs(fault.task).exists() and run.newest_step >= fault.at_step


def _inject(run: RunFolder, injector: FaultInjector, fault: Fault) -> None:
    """Inject the fault, after recording the event from which all times are measured."""
    if KINDS[fault.kind].recorded:
        run.event(fault.task, "fault", step=run.newest_step, kind=fault.kind, whole=fault.whole)
    injector.inject(fault.kind, fault.task, whole=fault.whole)


def _await(condition: Callable[[], object], run: RunFolder, timeout_s: float, what: str) -> None:
    """Wait for a condition, or the run's end."""
    if not wait_until(lambda: condition() or run.summary.exists(), timeout_s, POLL_S):
        raise TimedOut(f"waited {timeout_s:g} s for {what}; see `invoke status`")
