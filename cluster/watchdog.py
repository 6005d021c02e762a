"""Notices tasks that live but do nothing: frozen ones by their heartbeat, hanging ones by their step.

Times are measured on this machine's own clock, from the moment at which a heartbeat or a step was seen to change: the
clocks of several machines differ.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.files import create_json
from cluster.runs import FINAL_STATES, RunFolder
from cluster.spec import ClusterSpec, Role, Task

FROZEN_S = 8.0
"""A program that writes no heartbeat for so long (one is due every second) is frozen, and ended by its agent."""
SILENT_S = 12.0
"""A task whose agent did not act on that either is gone: another agent acts."""
IMPORT_S = 120.0
"""Longest time from the start barrier to a program's own first heartbeat."""
HANG_TIMEOUT_S = 60.0
"""Longest time without a new step, once there was a first one."""
SLOW_STATES_FACTOR = 10
"""How much longer it may take while no steps are due: saving, evaluating."""
EXAMINE_S = 0.5


@dataclass(frozen=True)
class Finding:
    """What is wrong, and whose doing it is."""

    task: str
    cause: str
    kind: str
    """`frozen`: the task of this agent; `silent`: another one; `hang`: no new step."""


class Watchdog:
    """Watches a generation for one task's agent."""

    def __init__(self, run: RunFolder, spec: ClusterSpec, task: Task, generation: int) -> None:
        self._hang_timeout_s = float(run.started.get("hang_timeout_s", HANG_TIMEOUT_S))
        self._run = run
        self._spec = spec
        self._task = task
        self._generation = generation
        self._changed: dict[str, tuple[Any, float]] = {}
        self._began = time.monotonic()
        self._next_examination = 0.0

    def examine(self) -> Finding | None:
        """Return what is found now, if anything; looks at most every `EXAMINE_S`."""
        now = time.monotonic()
        if now < self._next_examination:
            return None
        self._next_examination = now + EXAMINE_S
        beats = {
            task.name: beat
            for task in self._spec.tasks
            if (beat := self._run.heartbeat(task.name)) and beat["generation"] == self._generation
        }
        ages = {name: now - self._since(name, beat["updated_at"], now) for name, beat in beats.items()}
        return self._frozen(beats, ages, now) or self._hanging(beats, ages, now)

    @property
    def hang_told(self) -> bool:
        """Whether an agent found that this generation hangs."""
        return self._hang.exists()

    def tell_hang(self, finding: Finding) -> None:
        """Let every agent know, so that each has its program show what it is doing."""
        create_json(self._hang, {"task": finding.task, "cause": finding.cause, "time": time.time()})

    @property
    def _hang(self) -> Path:
        return self._run.control / f"hang-{self._generation}.json"

    def _since(self, key: str, value: Any, now: float) -> float:
        """Return when a value was first seen as it is."""
        if key not in self._changed or self._changed[key][0] != value:
            self._changed[key] = (value, now)
        return self._changed[key][1]

    def _frozen(self, beats: dict[str, Any], ages: dict[str, float], now: float) -> Finding | None:
        for name, age in ages.items():
            mine = name == self._task.name
            quiet_s, patience_s = age, FROZEN_S if mine else SILENT_S
            if mine and beats[name]["state"] == "waiting":  # until its program's own first heartbeat, the agent's
                quiet_s, patience_s = now - self._began, IMPORT_S
            if beats[name]["state"] in FINAL_STATES or quiet_s < patience_s:
                continue
            if not mine and self._spec.task(name).role == Role.EVALUATOR:
                continue
            return Finding(name, f"no sign of life for {quiet_s:.0f} s", "frozen" if mine else "silent")
        return None

    def _hanging(self, beats: dict[str, Any], ages: dict[str, float], now: float) -> Finding | None:
        """Look for missing steps, as the chief's agent; the others hear of it."""
        training = {name: beat for name, beat in beats.items() if not self._spec.serves(self._spec.task(name))}
        training.pop("evaluator", None)
        chief = training.get("chief")
        if self._task.role != Role.CHIEF or chief is None or self._run.script:
            return None
        stuck_s = now - self._since("the step", (chief["step"], chief["state"]), now)
        patience_s = self._hang_timeout_s * (1 if chief["state"] == "training" else SLOW_STATES_FACTOR)
        if stuck_s < patience_s or chief["state"] in FINAL_STATES or not self._begun():
            return None
        name = _differing(training, ages)
        told = f"; {name} differs: {training[name]['state']} at step {training[name]['step']}" if name else ""
        return Finding(name or "chief", f"no new step for {stuck_s:.0f} s at step {chief['step']}{told}", "hang")

    def _begun(self) -> bool:
        """Whether this generation has finished a step."""
        return any((e["event"], e["generation"]) == ("first step", self._generation) for e in self._run.events())


def _differing(beats: dict[str, Any], ages: dict[str, float]) -> str | None:
    """Return the task that is unlike the others: the most silent one, or one in another place."""
    oldest = max(beats, key=lambda name: ages[name])
    if ages[oldest] > FROZEN_S / 2:
        return oldest
    places = {name: (beat["step"], beat["state"]) for name, beat in beats.items()}
    common = Counter(places.values()).most_common()
    if len(common) < 2 or common[0][1] == common[1][1]:
        return None
    return next(name for name, place in places.items() if place == common[-1][0])
