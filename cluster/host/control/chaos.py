"""Injects faults into a run and measures their cost: `invoke chaos KIND TASK` and `invoke chaos storm`.

Each fault is recorded as an event in the run folder, from which the run's summary measures its restarts; the costs are
appended to `chaos.jsonl` there. A runtime's injector has a method for each kind of fault.
"""

import random
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.contract.recovery import restart_costs
from cluster.contract.results import reference
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Restart
from cluster.contract.spec import Role
from cluster.host.control import foreground
from cluster.host.launch.teardown import in_progress
from cluster.host.runtime import registry
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, TimedOut, UsageError, nearest
from cluster.system.json_files import append_json
from cluster.system.messages import COMMAND, counted
from cluster.system.terminal import print_lines
from cluster.system.waiting import wait_until

SLOW_S = 10.0
"""Duration of a fault to which no agent reacts: one that only slows a task down, or a lasting one in a single task."""
RECOVERY_TIMEOUT_S = 300.0
POLL_S = 0.02
WORKING = ("training", "saving", "evaluating", "done", "stopped")
STEPS_BETWEEN = (5, 40)
"""The minimum and maximum number of new steps between two faults of a storm."""
STORM = "storm"


@dataclass(frozen=True)
class FaultKind:
    """The properties of a kind of fault."""

    name: str  # on the command line, and of the injector's method
    lasts: bool = False  # whether it lasts until undone, which happens once an agent has reacted
    unnoticed: bool = False  # whether no agent reacts, so that it is undone after `SLOW_S`
    ends: Sequence[str | None] = (None, "succeeded")  # the acceptable outcomes of the run; None: it continues
    takes_whole: bool = False  # whether it can be injected into the task's agent, too
    needs_trainer: str = ""  # why it needs the built-in trainer; empty if it does not
    draws: int = 0  # its weight in the draws of a storm, if the run survives it
    whole_draws: int = 0  # its weight with the whole task as the target
    synchronous: bool = False  # drawn only for synchronous strategies: it costs steps that others cannot repeat
    elastic: bool = False  # drawn only for runs that can continue without a worker; lasts until they do


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
KINDS = {name: FaultKind(name, **values) for name, values in _TABLE.items()}
"""The kinds of fault by name. The order determines the draws of a storm with a given seed."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject: its kind, the task, and the earliest step."""

    kind: str
    task: str
    at_step: int = 0
    """The number of steps that the run must have done before the fault is injected."""
    whole: bool = False
    """For `kill`: whether to kill the task's agent, too, as if its container or machine died."""

    def __str__(self) -> str:
        return f"{self.kind}{' --whole' if self.whole else ''} {self.task}"


@dataclass(frozen=True)
class FaultCost:
    """The cost of a fault. Times are in seconds from the fault."""

    kind: str
    task: str
    step: int
    """The newest step when the fault was injected."""
    detected_s: float | None
    """Time until an agent reacted; None if nothing was restarted."""
    resumed_s: float | None
    """Time until the next new step, or the run's end; None for a script, which reports no steps."""
    steps_lost: int | None
    ended: str | None
    script_started_s: float | None = None

    @property
    def is_expected(self) -> bool:
        """Whether the outcome is one of those that the kind of fault allows in `ends`."""
        return self.ended in KINDS[self.kind].ends

    @property
    def description(self) -> str:
        if self.ended:
            return f"the run {self.ended} {self.resumed_s:.1f} s later"
        if self.detected_s is None:
            return f"no restart; a new step {self.resumed_s:.2f} s later"
        if self.script_started_s is not None:
            again = f"the script's process started again after {self.script_started_s:.2f} s"
            return f"noticed after {self.detected_s:.2f} s, {again}; what it repeats is not known"
        noticed = f"noticed after {self.detected_s:.2f} s, next new step after {self.resumed_s:.2f} s"
        return f"{noticed}, {self.steps_lost} steps done again"


def check_fault(run: RunFolder, fault: Fault) -> None:
    """Check that a fault can be injected into a run; raise UsageError if not."""
    if fault.kind not in KINDS:
        raise UsageError(f"unknown fault {fault.kind!r}{nearest(fault.kind, [*KINDS, STORM])}")
    kind = KINDS[fault.kind]
    run.load_cluster().task(fault.task)
    if fault.whole and not kind.takes_whole:
        raise UsageError(f"--whole with {fault.kind}: it is for kill, which otherwise kills only the task's program")
    registry.find_runtime(run).injector(run).check(fault.kind, fault.task)
    if kind.needs_trainer and run.script:
        raise UsageError(f"{fault.kind} with a script: {kind.needs_trainer}")
    if not in_progress(run):
        raise UsageError(f"run {run.name!r} is not in progress; start one with `{COMMAND} up --detach`")


def inject(run: RunFolder, fault: Fault, timeout_s: float = RECOVERY_TIMEOUT_S) -> FaultCost:
    """Inject a fault; return its cost once the run has recovered or ended.

    Raises:
        UsageError: the fault is refused, or the run ended before it could be injected.
        TimedOut: the run did not become ready, or neither recovered nor ended.
    """
    injector = registry.find_runtime(run).injector(run)

    def is_ready() -> bool:
        beat = run.heartbeat(fault.task)
        begun = beat is not None and beat.state in WORKING and beat.generation == run.generation
        return begun and run.programs(fault.task).exists() and run.newest_step >= fault.at_step

    _await(is_ready, run, timeout_s, f"{fault.task} to train and step {fault.at_step}")
    if run.summary.exists():
        raise UsageError(f"run {run.name!r} ended before step {fault.at_step}; nothing was injected")
    watch = _Watch(run, fault)
    try:
        # The run's summary measures times from this event.
        run.event(fault.task, "fault", step=run.newest_step, kind=fault.kind, whole=fault.whole)
        injector.inject(fault.kind, fault.task, whole=fault.whole)
        if watch.unnoticed:
            _await(lambda: time.time() > watch.time + SLOW_S, run, timeout_s, f"the end of {fault}")
            injector.undo(fault.task)
        elif watch.kind.lasts:
            _await(watch.has_been_noticed, run, timeout_s, f"an agent to notice {fault}")
            injector.undo(fault.task)
        _await(watch.has_recovered, run, timeout_s, f"the run to recover from {fault}")
        flipped = any(event.event == "flipped" and event.time > watch.time for event in run.events())
        if fault.kind == "flip" and not flipped:
            raise UsageError(f"run {run.name!r} ended before {fault.task} flipped a bit; nothing was injected")
    finally:
        injector.undo(fault.task)
    cost = watch.cost()
    append_json(run.path / "chaos.jsonl", {"time": watch.time, **asdict(cost)})
    return cost


class _Watch:
    """Watches a run from the moment before a fault is injected, to measure the fault's cost."""

    def __init__(self, run: RunFolder, fault: Fault) -> None:
        self._run, self._fault, self.kind = run, fault, KINDS[fault.kind]
        self.time = time.time()
        self.step, self.generation = run.newest_step, run.generation
        cluster, least = membership.cluster(run), run.started.min_workers
        workers = [task.name for task in cluster.of(Role.WORKER)]
        dispensable = least is not None and len(workers) > least and fault.task in workers
        self.is_left_out = self.kind.elastic and dispensable
        self.unnoticed = self.kind.unnoticed or (self.kind.lasts and len(cluster.tasks) == 1)
        """Whether no agent reacts to the fault, so that it must be undone after `SLOW_S`."""

    def has_been_noticed(self) -> bool:
        """Return whether an agent has reacted or, if the run can continue without the task, has left it out."""
        if self.is_left_out:
            return self._fault.task in membership.left_out(self._run)
        acted = ("restarted", "frozen", "silent", "hang")
        recent = [event for event in self._run.events() if event.time > self.time and event.event in acted]
        return self._run.generation > self.generation or any(event.task == self._fault.task for event in recent)

    def has_recovered(self) -> bool:
        if self._run.summary.exists():
            return True
        if costs := self._restarts():
            return costs[-1].resumed_s is not None or costs[-1].script_started_s is not None
        return self.unnoticed and bool(self._new_step_at())

    def _restarts(self) -> list[Restart]:
        alone = [Role.WORKER, *(role for role in Role if role.is_sidecar)]
        return restart_costs.costs(self._run, self.time, alone)

    def _new_step_at(self) -> float | None:
        """Return when the first new step was reported after `SLOW_S`, for a fault to which no agent reacts."""
        beats, ended = self._run.heartbeats().values(), self.time + SLOW_S
        return min((b.updated_at for b in beats if b.step > self.step and b.updated_at > ended), default=None)

    def cost(self) -> FaultCost:
        costs, ended = self._restarts(), self._run.load_summary()
        resumed_s: float | None
        if ended:
            resumed_s = self._run.outcome.time - self.time if self._run.outcome else 0.0
        elif costs:
            resumed_s = costs[-1].resumed_s
        else:
            resumed_s = (self._new_step_at() or time.time()) - self.time
        return FaultCost(
            self._fault.kind,
            self._fault.task,
            self.step,
            costs[0].detected_s if costs else None,
            None if resumed_s is None else round(resumed_s, 3),
            None if self._run.script else sum(cost.steps_lost or 0 for cost in costs),
            ended.state if ended else None,
            costs[-1].script_started_s if costs else None,
        )


def _await(condition: Callable[[], object], run: RunFolder, timeout_s: float, what: str) -> None:
    if not wait_until(lambda: condition() or run.summary.exists(), timeout_s, POLL_S):
        raise TimedOut(f"waited {timeout_s:g} s for {what}; see `{COMMAND} status`")


def run_storm(
    run: RunFolder, count: int, seed: int, kinds: Sequence[str], timeout_s: float, limit_s: float = float("inf")
) -> int:
    """Inject random faults, wait for the end of the run and print the result; return the exit code.

    `timeout_s` is the timeout of each wait for a fault's step and for its recovery; `limit_s` bounds all injections.
    """
    for kind in kinds or ("kill",):
        if kind in KINDS and None not in KINDS[kind].ends:
            raise UsageError(f"--kinds {kind}: it ends the run, and the storm with it; inject it alone")
        check_fault(run, Fault(kind, "chief"))
    if run.script:
        raise UsageError("storm with a script, which reports no steps to inject between: kill its tasks one by one")
    results = inject_all(run, count, seed, kinds, timeout_s, limit_s)
    print_lines(f"{counted(len(results), 'fault')} injected; waiting for the run's end")
    ended = foreground.show_until_end(run)
    foreground.print_end(run)
    if ended.state != "succeeded":
        cause = ended.failure
        why = f": {cause.task or 'the run'}: {cause.error}" if cause else ""
        print_lines(f"the run {ended.state} after {len(results)} of {counted(count, 'fault')}{why}")
    elif len(results) < count:
        print_lines(f"the run ended before {count} faults: train longer (-- --max-steps), or request fewer (--faults)")
    well = ended.state == "succeeded" and len(results) == count and reference.same_bits(run) is not False
    return EXIT_DONE if well else EXIT_FAILED


def inject_all(
    run: RunFolder,
    count: int,
    seed: int,
    kinds: Sequence[str],
    timeout_s: float = RECOVERY_TIMEOUT_S,
    limit_s: float = float("inf"),
) -> list[FaultCost]:
    """Inject up to `count` faults, some steps apart, as long as the run has enough steps left; return their costs.

    The kinds are drawn from `kinds`, or from all that the run survives. `seed` determines the faults, but not the exact
    time of their injection.
    """
    deadline = time.monotonic() + limit_s
    draw = random.Random(seed)  # noqa: S311  # reproducible, not cryptographic
    results: list[FaultCost] = []
    for number in range(1, count + 1):
        fault = _draw_fault(run, draw, kinds)
        chief = run.heartbeat("chief")
        last_step = (chief and chief.steps_total) or float("inf")  # not reported yet
        if run.load_summary() or run.newest_step + STEPS_BETWEEN[1] >= last_step:
            break
        if time.monotonic() > deadline:
            print_lines(f"{limit_s / 60:g} minutes have passed")
            break
        print_lines(f"fault {number}/{count}: {fault} at step {fault.at_step}")
        try:
            results.append(inject(run, fault, timeout_s))
        except UsageError:
            break  # the run ended during the wait for the step
        print_lines(f"  {results[-1].description}")
        if results[-1].ended:
            break
    return results


def _draw_fault(run: RunFolder, draw: random.Random, kinds: Sequence[str]) -> Fault:
    spec = membership.cluster(run)
    workers = [task.name for task in spec.of(Role.WORKER)]
    choices = [(kind, False) for kind in kinds]
    if not kinds:  # each kind that the run survives, by its weights for the program and the whole task
        elastic = run.started.min_workers is not None and bool(workers)
        survived = registry.find_runtime(run).injector.storm
        for kind in KINDS.values():
            if kind.name in survived and kind.synchronous <= spec.kind.synchronous and kind.elastic <= elastic:
                choices += [(kind.name, False)] * kind.draws + [(kind.name, True)] * kind.whole_draws
    name, whole = draw.choice(choices)
    tasks = [task.name for task in spec.tasks if not task.role.is_sidecar]
    if KINDS[name].elastic:  # the chief is never left out
        tasks = workers or tasks
    return Fault(name, draw.choice(tasks), run.newest_step + draw.randint(*STEPS_BETWEEN), whole)
