"""Detects tasks that are alive but do nothing: frozen ones by their heartbeat, hanging ones by their step.

The clocks of several machines differ, so times are measured on this machine's monotonic clock, from when a heartbeat or
a step was seen to change. Time in which this process was stopped or starved itself does not count.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.agent.hub import SILENCE_S
from cluster.agent.run_view import RunView
from cluster.contract.recovery import ends, standby_cluster
from cluster.contract.results.late_tasks import find_late
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S
from cluster.contract.run.records import FINAL_STATES, Heartbeat, TaskState
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.json_files import create_json

FROZEN_S = 8.0
"""A program without a heartbeat for this long (one is due every second) is frozen; its agent ends it."""
SILENT_S = 12.0
"""If its agent did not do that either, the task is gone, and another agent acts."""
IMPORT_S = 120.0
"""Longest time from the rendezvous to a program's own first heartbeat, and between two of an agent that imports."""
SLOW_FACTOR = 10
"""How many times as long the first step of a generation, saving and evaluating may take."""
EXAMINE_S = 0.5
OTHERS_S = 2.0
"""How often an agent reads the heartbeats of other tasks while all is well; the chief's looks for hangs more often."""
READ_AT_ONCE = 16
"""In a larger gang they are read less often, so that all agents together read as many a second for each task."""
COUNTED_S = 1.0
"""What counts of the time between two examinations. A longer one means that this process was stopped, or waited for a
processor as those that it watches may have to."""
PROOF_S = SILENCE_S + 2.0
"""After this time the hub has reported to every agent that it has no connection to a task that is gone."""
START_STATES = frozenset({TaskState.STARTING, TaskState.WAITING, TaskState.RESTARTING, TaskState.COMPILING})


@dataclass(frozen=True)
class Stall:
    """A task that does nothing, and how that shows."""

    task: str
    cause: str
    kind: str
    """`frozen`: this agent's task; `silent`: another task; `hang`: no new step; `late`: no task has joined."""
    stopped: bool = False
    """Whether a signal had stopped the program."""


class Watchdog:
    """Watches one generation for one task's agent."""

    def __init__(self, run: RunView, spec: ClusterSpec, task: Task, generation: int) -> None:
        """Begin to watch a complete cluster."""
        self._hang_timeout_s = run.folder.started.hang_timeout_s or HANG_TIMEOUT_S
        self._run = run
        self._spec = spec
        self._task = task
        self._generation = generation
        self._scripted = run.folder.script is not None
        self._changed: dict[str, tuple[Any, float]] = {}
        self._newest: dict[str, Heartbeat] = {}
        self._behind: set[str] = set()
        """The tasks whose newest heartbeat is of an earlier generation."""
        self._renewed: set[str] = set()
        """The heartbeats and steps that were seen to change since `suspect_others`."""
        self._suspected_at = 0.0
        self._began = self._examined = time.monotonic()
        larger = max(1.0, len(spec.tasks) / READ_AT_ONCE)
        self._others_every_s = EXAMINE_S if task.role == Role.CHIEF else OTHERS_S * larger
        self._others_read_at = self._began - self._others_every_s
        self._names = [task.name for task in spec.tasks]
        self._hangs, self._hang_looked = False, self._began - EXAMINE_S

    def stopped(self, stopped_s: float) -> Stall | None:
        """Return a finding if this task's program has been stopped by a signal for too long."""
        if stopped_s < FROZEN_S:
            return None
        return Stall(self._task.name, f"no sign of life for {stopped_s:.0f} s", "frozen", stopped=True)

    def examine(self, stopped_s: float = 0.0) -> Stall | None:
        """Return a finding, if there is one. Looks at most every `EXAMINE_S`.

        `stopped_s` says for how long a signal has kept this task's program stopped.
        """
        now = time.monotonic()
        if finding := self.stopped(stopped_s):
            return finding
        if now - self._examined < EXAMINE_S and self._changed:
            return None
        self._discount(now - self._examined)
        self._examined = now
        unlinked = self._run.unlinked  # while the hub is connected, its agent watches the others
        watched = self._names if unlinked is None else [name for name in self._names if name in unlinked]
        beats = self._read(self._run.heartbeat, watched, now, self._others_every_s)
        ages = {name: now - self._since(name, beat.updated_at, now) for name, beat in beats.items()}
        return self._frozen(beats, ages, now) or self._hanging(beats, now)

    def late(self, timeout_s: float) -> Stall | None:
        """Return a finding if none of the tasks that train has joined this generation in so many seconds.

        It is for tasks that hold no rendezvous, in which missing tasks are noticed.
        """
        trains = sorted(task.name for task in self._spec.tasks if not task.role.is_sidecar)
        if time.monotonic() - self._began < timeout_s or not self._behind.issuperset(trains):
            return None
        missing = ", ".join(trains)
        error = f"no task joined generation {self._generation} in {timeout_s:g} s: missing {missing}"
        return Stall(trains[0], error, "late")

    def describe_late(self, cause: str, *silent: str) -> str:
        """Return a cause with the tasks for which the others wait, if there are any. Some may have been silent."""
        text = find_late(self._spec, self._run.heartbeats(), self._generation, silent)[1]
        return f"{cause}; {text}" if text else cause

    def longest_silent(self) -> tuple[str, float]:
        """Return which other task has written no heartbeat for longest, and for how many seconds; no name if none runs.

        A program that has ended writes no heartbeat, but its agent reports the end. The folder counts here: this
        is about a task that froze or died a moment ago, with its connection. A network file system may hide a task's
        first heartbeat for a minute; then a script's task is silent unless it is connected to the hub.
        """
        ages = {
            name: age_s
            for name, (hidden, age_s) in self._others().items()
            if not (hidden and self._run.is_connected(name))
        }
        return max(ages.items(), key=lambda each: each[1], default=("", 0.0))

    def suspect_others(self) -> None:
        """From now on count another task as alive only once it is seen to write a heartbeat again."""
        self._others_read_at = float("-inf")
        self._suspected_at = time.monotonic()
        self._others()
        self._renewed.clear()

    @property
    def all_are_alive(self) -> bool:
        """Whether every other task was seen to write a heartbeat since `suspect_others`, or its agent reported its end.

        A task whose heartbeat is hidden counts as alive if it is connected to the hub, after the time in which the hub
        would have noticed that it was gone.
        """
        proven = time.monotonic() - self._suspected_at > PROOF_S
        return all(
            name in self._renewed or (hidden and proven and self._run.is_connected(name))
            for name, (hidden, _) in self._others().items()
        )

    @property
    def hang_reported(self) -> bool:
        """Whether an agent has reported that this generation hangs. Looks at most every `EXAMINE_S`."""
        now = time.monotonic()
        if not self._hangs and now - self._hang_looked >= EXAMINE_S:
            self._hangs, self._hang_looked = self._hang.exists(), now
        return self._hangs

    def report_hang(self, finding: Stall) -> None:
        """Report a hang to every agent, so that each makes its program print its stacks."""
        create_json(self._hang, {"task": finding.task, "cause": finding.cause, "time": time.time()})

    @property
    def _hang(self) -> Path:
        return self._run.folder.control / f"hang-{self._generation}.json"

    def _read(
        self, read: Callable[[str], Heartbeat | None], watched: Sequence[str], now: float, others_every_s: float
    ) -> dict[str, Heartbeat]:
        """Return the heartbeats of this generation, of which those watched are read again after so long."""
        names = dict.fromkeys([self._task.name, Role.CHIEF.value])  # the chief's agent watches all others
        self._newest = {name: beat for name, beat in self._newest.items() if name in names or name in watched}
        self._behind &= {*names, *watched}
        if now - self._others_read_at >= others_every_s:
            self._others_read_at = now
            names |= dict.fromkeys(watched)
        for name in names:
            beat = read(name)
            self._behind.discard(name)
            if beat and beat.generation == self._generation:
                self._newest[name] = beat
            else:
                self._newest.pop(name, None)
                if beat and beat.generation < self._generation:
                    self._behind.add(name)
        return self._newest

    def _others(self) -> dict[str, tuple[bool, float]]:
        """Return, of each other member that is not known to have ended, whether no heartbeat was seen, and its age.

        A script starts only once all have written one. Another program may end while some tasks are not even there:
        these are left out.
        """
        now = time.monotonic()
        known = {self._task.name, *ends.ended_tasks(self._run.folder, self._generation)}
        beats = self._read(self._run.folder.heartbeat, self._names, now, EXAMINE_S)
        found = {}
        for name in (task.name for task in self._spec.members if task.name not in known):
            beat = beats.get(name)
            if self._scripted if beat is None else _is_running(beat):
                since = self._since(name, beat and beat.updated_at, now)
                found[name] = beat is None, now - since
        return found

    def _discount(self, gap_s: float) -> None:
        """Leave out time in which this process was stopped or starved, or its machine slept."""
        if (lost_s := gap_s - COUNTED_S) > 0:
            self._began += lost_s
            self._changed = {key: (value, since + lost_s) for key, (value, since) in self._changed.items()}

    def _since(self, key: str, value: Any, now: float) -> float:
        """Return when a value was first seen as it is now."""
        before = self._changed.get(key)
        if before is None or before[0] != value:
            self._changed[key] = (value, now)
            if before is not None and before[0] is not None:
                self._renewed.add(key)
        return self._changed[key][1]

    def _frozen(self, beats: dict[str, Heartbeat], ages: dict[str, float], now: float) -> Stall | None:
        for name, age in ages.items():
            mine = name == self._task.name
            quiet_s, patience_s = age, FROZEN_S if mine else SILENT_S
            if beats[name].importing:  # while a library is loaded from a slow disk no thread runs
                patience_s = IMPORT_S
            if mine and beats[name].state == "waiting":  # until its program's own first heartbeat, the agent's
                quiet_s, patience_s = now - self._began, IMPORT_S
            if not _is_running(beats[name]) or quiet_s < patience_s:
                continue
            if not mine and self._spec.task(name).role.is_sidecar:
                continue
            return Stall(name, f"no heartbeat for {quiet_s:.0f} s", "frozen" if mine else "silent")
        # Without a rendezvous a task may never join the generation.
        waited_s = now - self._began
        late = sorted(name for name in self._behind if not self._spec.task(name).role.is_sidecar)
        if late and waited_s >= SILENT_S and standby_cluster.is_standby_generation(self._run.folder, self._generation):
            return Stall(late[0], f"it did not join generation {self._generation} in {waited_s:.0f} s", "silent")
        return None

    def _hanging(self, beats: dict[str, Heartbeat], now: float) -> Stall | None:
        """Look for missing steps: the chief's agent does so for all tasks, the evaluator's for itself."""
        own = beats.get(self._task.name)
        if self._task.role not in (Role.CHIEF, Role.EVALUATOR) or own is None or not _is_running(own) or self._scripted:
            return None
        if own.state in START_STATES:  # time in all of these states counts towards the first step
            stuck_s, missing = now - self._began, "first step"
        elif self._task.role == Role.EVALUATOR:
            return None  # it may wait for checkpoints forever
        else:
            stuck_s, missing = now - self._since("the step", (own.step, own.state), now), "new step"
        if stuck_s < self._hang_timeout_s * (1 if own.state == "training" else SLOW_FACTOR):
            return None
        cause = f"no {missing} for {stuck_s:.0f} s at step {own.step}"
        if self._task.role == Role.EVALUATOR:
            return Stall(self._task.name, cause, "hang")
        late, _ = find_late(self._spec, self._run.heartbeats(), self._generation)
        return Stall([*late, self._task.name][0], cause, "hang")


def _is_running(beat: Heartbeat) -> bool:
    return beat.state not in FINAL_STATES
