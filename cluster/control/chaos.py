"""A real fault on a real run, and what it cost: `invoke chaos KIND TASK`.

A fault is an event in the run folder, so that the run's own summary counts from it; results go to `chaos.jsonl` there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.control import faults
from cluster.control.faults import Means
from cluster.errors import TimedOut, UsageError, nearest
from cluster.launch.teardown import in_progress, is_docker
from cluster.recovery import restarts
from cluster.run import records
from cluster.run.folder import RunFolder
from cluster.spec import Role
from cluster.system.files import open_file
from cluster.system.journal import append_json

KINDS = ("kill", "stop", "pause", "partition", "slow", "oom", "diskfull", "corrupt")
LASTING = ("pause", "partition")
"""Faults that end once the others have noticed: the machine that hung comes back, the cable is plugged in again."""
SLOW_S = 10.0
"""How long a fault lasts that no other task acts on: one that only slows a task down, or any in a run of one task."""
RECOVERY_TIMEOUT_S = 300.0
POLL_S = 0.02
WORKING = ("training", "saving", "evaluating", "done", "stopped")


@dataclass(frozen=True)
class Fault:
    """What is done, to whom, and when."""

    kind: str
    task: str
    at_step: int = 0
    """Not before the run has done so many steps."""
    whole: bool = False
    """For `kill`: the task's agent too, as when its container or its machine dies."""

    def __str__(self) -> str:
        return f"{self.kind}{' --whole' if self.whole else ''} {self.task}"


@dataclass(frozen=True)
class Result:
    """What a fault cost; times in seconds from the fault."""

    kind: str
    task: str
    step: int
    """The newest step when it was inflicted."""
    detected_s: float | None
    """Until an agent acted on it; None where nothing had to be started again."""
    resumed_s: float | None
    """Until the next new step, or the run's end."""
    steps_lost: int | None
    ended: str | None
    """How the run ended, if it did."""

    @property
    def as_it_should(self) -> bool:
        """Whether the run went on, or ended as it must from this fault."""
        return self.ended in {"stop": ("stopped",), "diskfull": ("failed",)}.get(self.kind, (None, "succeeded"))

    @property
    def told(self) -> str:
        """What is printed."""
        if self.ended:
            return f"the run {self.ended} {self.resumed_s:.1f} s later"
        if self.detected_s is None:
            return f"nothing had to be started again; a new step {self.resumed_s:.2f} s later"
        return (
            f"noticed after {self.detected_s:.2f} s, next new step after {self.resumed_s:.2f} s, "
            f"{self.steps_lost} steps done again"
        )


def check(run: RunFolder, fault: Fault) -> None:
    """Check that a fault can be inflicted on a run.

    Raises:
        UsageError: it cannot.
    """
    if fault.kind not in KINDS:
        raise UsageError(f"chaos {fault.kind!r} is no fault{nearest(fault.kind, [*KINDS, 'storm'])}")
    run.load_cluster().task(fault.task)
    if fault.whole and fault.kind != "kill":
        raise UsageError(f"--whole with {fault.kind}: it is for kill, which else kills the task's program alone")
    if fault.kind == "partition" and not is_docker(run):
        faults.means(run).cut_off(fault.task)  # which refuses, in its own words
    if fault.kind == "diskfull":
        faults.means(run).check_disk()
    if fault.kind == "corrupt" and run.script:
        raise UsageError("corrupt with a script: its checkpoints are its own")
    if not in_progress(run):
        raise UsageError(f"run {run.name!r} is not in progress; start one with `invoke up --detach`")


def inflict(run: RunFolder, fault: Fault, timeout_s: float = RECOVERY_TIMEOUT_S) -> Result:
    """Inflict a fault and return once the run has recovered or ended.

    Raises:
        UsageError: this run does not allow it.
        TimedOut: the run neither recovered nor ended.
    """
    means = faults.means(run)
    _await(lambda: _ready(run, fault), run, timeout_s, f"{fault.task} to train and step {fault.at_step}")
    if run.summary.exists():
        raise UsageError(f"run {run.name!r} ended before step {fault.at_step}; nothing was inflicted")
    before = _Before(run)
    try:
        _do(run, means, fault)
        if before.nobody_acts_on(fault):
            deadline = before.time + SLOW_S
            _await(lambda: time.time() > deadline, run, timeout_s, f"the end of {fault}")
            means.relieve(fault.task)
        elif fault.kind in LASTING:
            _await(lambda: before.noticed(fault.task), run, timeout_s, f"anybody to notice {fault}")
            means.relieve(fault.task)
        _await(lambda: before.recovered(fault), run, timeout_s, f"the run to recover from {fault}")
    finally:
        means.relieve(fault.task)
    result = before.result(fault)
    append_json(run.path / "chaos.jsonl", {"time": before.time, **asdict(result)})
    return result


class _Before:
    """How a run was when a fault was inflicted, and what has become of it since."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.time = time.time()
        self.step = run.newest_step
        self.generation = run.generation

    def nobody_acts_on(self, fault: Fault) -> bool:
        """Whether a lasting fault is one that nobody restarts the task for."""
        alone = len(self._run.load_cluster().tasks) == 1
        return fault.kind == "slow" or (fault.kind in LASTING and alone)

    def noticed(self, task: str) -> bool:
        """Whether any agent has acted."""
        acted = ("restarted", "frozen", "silent", "hang")
        recent = [e for e in self._run.events() if e["time"] > self.time and e["event"] in acted]
        return self._run.generation > self.generation or any(e["task"] == task for e in recent)

    def costs(self) -> list[dict[str, Any]]:
        """Return what the restarts since have cost."""
        return restarts.costs(self._run, self.time, (Role.WORKER, Role.EVALUATOR))

    def recovered(self, fault: Fault) -> bool:
        """Whether the run does new steps again, or has ended."""
        if self._run.summary.exists():
            return True
        if costs := self.costs():
            return costs[-1]["resumed_s"] is not None
        return self.nobody_acts_on(fault) and bool(self.new_step_after(self.time + SLOW_S))

    def new_step_after(self, moment: float) -> float | None:
        """Return when a task told of a new step after a moment."""
        beats = self._run.heartbeats().values()
        told = [beat["updated_at"] for beat in beats if beat["step"] > self.step and beat["updated_at"] > moment]
        return min(told, default=None)

    def result(self, fault: Fault) -> Result:
        """Return what the fault cost."""
        costs, ended = self.costs(), self._run.ended
        if ended:
            resumed_s = self._run.outcome["time"] - self.time if self._run.outcome else 0.0
        elif costs:
            resumed_s = costs[-1]["resumed_s"]
        else:
            resumed_s = (self.new_step_after(self.time + SLOW_S) or time.time()) - self.time
        return Result(
            fault.kind,
            fault.task,
            self.step,
            costs[0]["detected_s"] if costs else None,
            round(resumed_s, 3),
            sum(cost["steps_lost"] or 0 for cost in costs),
            ended["state"] if ended else None,
        )


def _ready(run: RunFolder, fault: Fault) -> bool:
    """Whether the task works in the newest generation, and the step has come."""
    beat = run.heartbeats().get(fault.task, {"state": "starting", "generation": -1})
    begun = beat["state"] in WORKING and beat["generation"] == run.generation
    return begun and run.programs(fault.task).exists() and run.newest_step >= fault.at_step


def _do(run: RunFolder, means: Means, fault: Fault) -> None:
    """Inflict the fault; it is an event first, from which everything is counted."""

    def record() -> None:
        run.event(fault.task, "fault", step=run.newest_step, kind=fault.kind, whole=fault.whole)

    if fault.kind == "diskfull":
        means.fill_disk()  # which also leaves no room to tell of it
        return
    record()
    if fault.kind == "kill":
        means.signal(fault.task, signal.SIGKILL, *(["agent", "program"] if fault.whole else ["program"]))
    elif fault.kind == "stop":
        means.signal(fault.task, signal.SIGTERM, "agent")
    elif fault.kind == "pause":
        means.freeze(fault.task)
    elif fault.kind == "partition":
        means.cut_off(fault.task)
    elif fault.kind == "slow":
        means.slow_down(fault.task)
    elif fault.kind == "oom":
        means.exhaust_memory(fault.task)
    else:
        _damage_newest(run)
        means.signal(fault.task, signal.SIGKILL, "program")


def _damage_newest(run: RunFolder) -> None:
    """Cut off the last byte of the newest checkpoint, as a disk that lies does."""
    if saved := run.saved_steps:
        record = records.read(run.checkpoints / f"ckpt-{saved[-1]}.json", records.checkpoint)
        name = max(record["files"].items(), key=lambda entry: entry[1]["size_bytes"])[0]
        with open_file(run.checkpoints / Path(name).name, "r+b") as file:
            file.truncate(file.seek(0, 2) - 1)


def _await(condition: Callable[[], object], run: RunFolder, timeout_s: float, what: str) -> None:
    """Wait for a condition, or the run's end.

    Raises:
        TimedOut: neither came.
    """
    deadline = time.monotonic() + timeout_s
    while not condition() and not run.summary.exists():
        if time.monotonic() > deadline:
            raise TimedOut(f"waited {timeout_s:g} s for {what}; see `invoke status`")
        time.sleep(POLL_S)
