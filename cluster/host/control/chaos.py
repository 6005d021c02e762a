"""Inject faults into a run and measure their cost: `invoke chaos KIND TASK` and `invoke chaos storm`.

A fault is an event in the run folder, so that the run's own summary counts from it; results go to `chaos.jsonl` there.
A runtime's injector injects each kind, by a method of its name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from cluster.contract.recovery import restart_costs
from cluster.contract.results import reference
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.summary_records import Restart
from cluster.contract.spec import Role
from cluster.host.control import foreground
from cluster.host.launch.teardown import in_progress
from cluster.host.runtime import registry
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, TimedOut, UsageError, nearest
from cluster.system.json_files import append_json
from cluster.system.messages import counted
from cluster.system.terminal import print_lines
from cluster.system.waiting import wait_until

SLOW_S = 10.0
"""Duration of a fault that no other task acts on: one that only slows a task down, or any in a run of one task."""
RECOVERY_TIMEOUT_S = 300.0
POLL_S = 0.02
WORKING = ("training", "saving", "evaluating", "done", "stopped")
STEPS_BETWEEN = (5, 40)
"""Fewest and most new steps between two faults of a storm."""
STORM = "storm"


@dataclass(frozen=True)
class FaultKind:
    """The properties of a kind of fault.

    Attributes:
        name: on the command line, and of the method that injects it.
        lasts: whether it lasts until it is undone, which happens once the others have noticed it.
        unnoticed: whether no other task acts on it, so that it is ended after some seconds.
        ends: how the run may end because of it; None: it continues.
        takes_whole: whether it can be injected into the task's agent too.
        recorded: whether an event records it, from which everything is counted.
        needs_trainer: why it needs the built-in trainer; empty where it does not.
        draws: how often it is among the kinds that a storm draws from, where the run survives it.
        whole_draws: the same for the whole task.
        synchronous: whether a storm draws it for synchronous strategies alone, because it costs steps that others
            cannot repeat.
        elastic: whether a storm draws it only for runs that continue without a worker, see `--min-workers`; there it
            lasts until they do.
    """

    name: str
    lasts: bool = False
    unnoticed: bool = False
    ends: tuple[str | None, ...] = (None, "succeeded")
    takes_whole: bool = False
    recorded: bool = True
    needs_trainer: str = ""
    draws: int = 0
    whole_draws: int = 0
    synchronous: bool = False
    elastic: bool = False


KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("kill", takes_whole=True, draws=6, whole_draws=2),
        FaultKind("lose", lasts=True, draws=1, elastic=True),  # the machine that was lost is there again
        FaultKind("stop", ends=("stopped",)),
        FaultKind("pause", lasts=True, draws=1),  # the machine that hung comes back
        FaultKind("slow", lasts=True, unnoticed=True, draws=1),
        # A damaged checkpoint costs the steps since the one before it.
        FaultKind("corrupt", needs_trainer="only the script knows its checkpoints", draws=1, synchronous=True),
        FaultKind("partition", lasts=True, draws=1),  # the cable is plugged in again
        FaultKind("oom", draws=1),
        FaultKind("diskfull", ends=("failed",), recorded=False),  # no room is left for an event
    )
}
"""Every kind by its name; a storm draws from them in this order."""


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
    """The cost of a fault; times in seconds from the fault."""

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
        raise UsageError(f"unknown fault {fault.kind!r}{nearest(fault.kind, [*KINDS, STORM])}")
    kind = KINDS[fault.kind]
    run.load_cluster().task(fault.task)
    if fault.whole and not kind.takes_whole:
        raise UsageError(f"--whole with {fault.kind}: it is for kill, which else kills the task's program alone")
    registry.of(run).faults(run).check(fault.kind, fault.task)
    if kind.needs_trainer and run.script:
        raise UsageError(f"{fault.kind} with a script: {kind.needs_trainer}")
    if not in_progress(run):
        raise UsageError(f"run {run.name!r} is not in progress; start one with `invoke up --detach`")


def inject(run: RunFolder, fault: Fault, timeout_s: float = RECOVERY_TIMEOUT_S) -> Result:
    """Inject a fault, and return once the run has recovered or ended.

    Raises:
        UsageError: the run does not allow it.
        TimedOut: the run neither recovered nor ended.
    """
    injector, kind = registry.of(run).faults(run), KINDS[fault.kind]
    _await(lambda: _ready(run, fault), run, timeout_s, f"{fault.task} to train and step {fault.at_step}")
    if run.summary.exists():
        raise UsageError(f"run {run.name!r} ended before step {fault.at_step}; nothing was injected")
    before = _Before(run)
    try:
        if kind.recorded:  # all times are measured from this event
            run.event(fault.task, "fault", step=run.newest_step, kind=fault.kind, whole=fault.whole)
        injector.inject(fault.kind, fault.task, whole=fault.whole)
        if before.nobody_acts_on(fault):
            deadline = before.time + SLOW_S
            _await(lambda: time.time() > deadline, run, timeout_s, f"the end of {fault}")
            injector.undo(fault.task)
        elif kind.lasts:
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
        """The tasks without any one of which the run continues."""

    def nobody_acts_on(self, fault: Fault) -> bool:
        """Whether a lasting fault is one for which no agent restarts the task."""
        alone = len(membership.cluster(self._run).tasks) == 1
        return KINDS[fault.kind].unnoticed or (KINDS[fault.kind].lasts and alone)

    def noticed(self, fault: Fault) -> bool:
        """Whether any agent has acted; where the run continues without the task, whether it does."""
        if KINDS[fault.kind].elastic and fault.task in self._dispensable:
            return fault.task in membership.left_out(self._run)
        acted = ("restarted", "frozen", "silent", "hang")
        recent = [e for e in self._run.events() if e.time > self.time and e.event in acted]
        return self._run.generation > self.generation or any(e.task == fault.task for e in recent)

    def costs(self) -> list[Restart]:
        alone = [Role.WORKER, *(role for role in Role if role.is_sidecar)]
        return restart_costs.costs(self._run, self.time, alone)

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


def _await(condition: Callable[[], object], run: RunFolder, timeout_s: float, what: str) -> None:
    """Wait for a condition, or the run's end."""
    if not wait_until(lambda: condition() or run.summary.exists(), timeout_s, POLL_S):
        raise TimedOut(f"waited {timeout_s:g} s for {what}; see `invoke status`")


def storm(
    run: RunFolder, count: int, seed: int, kinds: Sequence[str], timeout_s: float, limit_s: float = float("inf")
) -> int:
    """Inject faults, wait for the end of the run, report the result; return the exit code.

    `timeout_s` bounds the wait for the step of each fault, and for the recovery from it; `limit_s` all of them.

    Raises:
        UsageError: a storm is not possible in this run.
    """
    for kind in kinds or ("kill",):
        if kind in KINDS and None not in KINDS[kind].ends:
            raise UsageError(f"--kinds {kind}: it ends the run, and the storm with it; inject it alone")
        check(run, Fault(kind, "chief"))
    if run.script:
        raise UsageError(
            "storm with a script: a script reports no steps between which to inject faults; kill its tasks one by one"
        )
    results = inject_all(run, count, seed, kinds, print_lines, timeout_s, limit_s)
    print_lines(f"{counted(len(results), 'fault')} injected; waiting for the run's end")
    ended = foreground.show_until_end(run)
    foreground.print_end(run)
    if ended.state != "succeeded":
        cause = ended.failure
        why = f": {cause.task or 'the run'}: {cause.error}" if cause else ""
        print_lines(f"the run {ended.state} after {len(results)} of {counted(count, 'fault')}{why}")
    elif len(results) < count:
        print_lines(
            f"the run had no room for {count} faults: train for longer (-- --max-steps), or request fewer (--faults)"
        )
    well = ended.state == "succeeded" and len(results) == count and reference.same_bits(run) is not False
    return EXIT_DONE if well else EXIT_FAILED


def inject_all(
    run: RunFolder,
    count: int,
    seed: int,
    kinds: Sequence[str],
    log: Callable[[str], None],
    timeout_s: float = RECOVERY_TIMEOUT_S,
    limit_s: float = float("inf"),
) -> list[Result]:
    """Inject faults of some kinds, or of all that fit the run, some steps apart, until the run has no room for more.

    `seed` determines the faults; when they are injected depends on the run.
    """
    deadline = time.monotonic() + limit_s
    draw = random.Random(seed)  # noqa: S311  # chaos needs to be repeated, not to be secret
    results: list[Result] = []
    for number in range(1, count + 1):
        fault = _drawn(run, draw, kinds)
        chief = run.heartbeat("chief")
        last_step = (chief and chief.steps_total) or float("inf")  # not reported yet
        if run.load_summary() or run.newest_step + STEPS_BETWEEN[1] >= last_step:
            break
        if time.monotonic() > deadline:
            log(f"{limit_s / 60:g} minutes are over")
            break
        log(f"fault {number}/{count}: {fault} at step {fault.at_step}")
        try:
            results.append(inject(run, fault, timeout_s))
        except UsageError:
            break  # it ended while waiting for the step
        log(f"  {results[-1].description}")
        if results[-1].ended:
            break
    return results


def _drawn(run: RunFolder, draw: random.Random, kinds: Sequence[str]) -> Fault:
    spec = membership.cluster(run)
    tasks = [task.name for task in spec.tasks if not task.role.is_sidecar]
    if kinds:
        kind, whole = draw.choice(kinds), False
    else:
        survived = registry.of(run).faults(run).storm
        elastic = run.started.min_workers is not None and bool(spec.of(Role.WORKER))
        kind, whole = draw.choice(_choices(survived, synchronous=spec.kind.synchronous, elastic=elastic))
    if KINDS[kind].elastic:  # the chief is never left out
        tasks = [task.name for task in spec.of(Role.WORKER)] or tasks
    return Fault(kind, draw.choice(tasks), run.newest_step + draw.randint(*STEPS_BETWEEN), whole)


def _choices(survived: Collection[str], *, synchronous: bool, elastic: bool) -> list[tuple[str, bool]]:
    """List each kind of fault as often as it weighs, and whether it is one of the whole task."""
    choices: list[tuple[str, bool]] = []
    for kind in KINDS.values():
        fits = (synchronous or not kind.synchronous) and (elastic or not kind.elastic)
        if kind.name in survived and fits:
            choices += [(kind.name, False)] * kind.draws + [(kind.name, True)] * kind.whole_draws
    return choices
