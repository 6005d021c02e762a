"""Detects tasks that are alive but make no progress: frozen tasks by their heartbeat, hanging tasks by their step.

Clocks of different machines differ, so durations are measured on this machine's monotonic clock, from the moment at
which a change of a heartbeat or step was observed. Time in which this process itself was stopped does not count.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.agent.hub import SILENCE_S
from cluster.agent.run_view import RunView
from cluster.contract.recovery import ends, standby_cluster
from cluster.contract.results.late_tasks import find_late
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S, slow_timeout_s
from cluster.contract.run.records import FINAL_STATES, Heartbeat, TaskState
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.json_files import create_json, write_json

FROZEN_S = 8.0
"""A program that a signal keeps stopped for this long is frozen; its agent ends it."""
VOUCH_S = 4.0
"""After this long without a heartbeat (one is due every second) of a program that runs, its agent writes one.

No thread of Python runs during a long call that holds the interpreter's lock, such as sorting a large list. A program
that is only silent therefore gets as long as one without a new step.
"""
SILENT_S = 12.0
"""A task counts as gone, and another agent acts, after this long without a heartbeat, even by its agent."""
UNDECIDED_S = 2 * SILENT_S
"""After this long, the agent of a failed script counts as gone; until then it may wait for other tasks' reports."""
IMPORT_S = 120.0
"""Longest time from the rendezvous to a program's own first heartbeat, and between heartbeats while importing."""
EXAMINE_S = 0.5
OTHERS_S = 2.0
"""How often an agent reads the heartbeats of other tasks; the chief's agent reads them every `EXAMINE_S`."""
READ_AT_ONCE = 16
"""In a gang of more tasks, heartbeats are read less often, so that the reads per second and task stay the same."""
AWAY_S = 4.0
"""A longer time between two examinations means that this process was stopped and missed changes."""
PROOF_S = SILENCE_S + 2.0
"""By this time the hub has reported to every agent that a task which is gone has no connection."""
START_STATES = frozenset({TaskState.STARTING, TaskState.WAITING, TaskState.RESTARTING, TaskState.COMPILING})


@dataclass(frozen=True)
class Stall:
    """A task that makes no progress, and the symptom."""

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
        self.slow_timeout_s = slow_timeout_s(run.folder)
        self._run = run
        self._spec = spec
        self._task = task
        self._generation = generation
        self._scripted = run.folder.script is not None
        self._vouched_at: float | None = None
        """The time in the heartbeat that this agent wrote last for its program."""
        self._changed: dict[str, tuple[Any, float]] = {}
        self._newest: dict[str, Heartbeat] = {}
        self._behind: set[str] = set()
        """The tasks whose newest heartbeat is of an earlier generation."""
        self._renewed: set[str] = set()
        """The heartbeats and steps that were seen to change since `suspect_others`."""
        self._suspected_at = 0.0
        self._began = self._examined = time.monotonic()
        self._first_step_s = 0.0  # with all that precedes it since the rendezvous
        larger = max(1.0, len(spec.tasks) / READ_AT_ONCE)
        self._others_every_s = EXAMINE_S if task.role == Role.CHIEF else OTHERS_S * larger
        self._others_read_at = self._began - self._others_every_s
        self._names = [task.name for task in spec.tasks]
        self._hang = run.folder.control / f"hang-{generation}.json"
        self._hangs, self._hang_looked = False, self._began - EXAMINE_S

    def stopped(self, stopped_s: float) -> Stall | None:
        """Return a stall if a signal has kept this task's program stopped for too long."""
        if stopped_s < FROZEN_S:
            return None
        return Stall(self._task.name, f"no sign of life for {stopped_s:.0f} s", "frozen", stopped=True)

    def examine(self, stopped_s: float = 0.0) -> Stall | None:
        """Return a stalled task, or None. Reads heartbeats at most every `EXAMINE_S`.

        `stopped_s` is how long, in seconds, a signal has kept this task's program stopped.
        """
        now = time.monotonic()
        if finding := self.stopped(stopped_s):
            return finding
        if now - self._examined < EXAMINE_S and self._changed:
            return None
        if (gap_s := now - self._examined) > AWAY_S:  # this process was stopped, or its machine slept
            self._began += gap_s
            self._changed = {key: (value, since + gap_s) for key, (value, since) in self._changed.items()}
        self._examined = now
        unlinked = self._run.unlinked  # while the hub is connected, the chief's agent watches the others
        watched = self._names if unlinked is None else [name for name in self._names if name in unlinked]
        beats = self._read(self._run.heartbeat, watched, now, self._others_every_s)
        ages = {name: now - self._since(name, self._written_at(beat), now) for name, beat in beats.items()}
        if (own := beats.get(self._task.name)) and ages[own.task] >= VOUCH_S and not stopped_s:
            self._vouch(own)
        return self._frozen(beats, ages, now) or self._hanging(beats, now)

    def late(self, timeout_s: float) -> Stall | None:
        """Return a stall if no training task has joined this generation within `timeout_s`.

        Used by tasks that hold no rendezvous, which would otherwise notice missing tasks.
        """
        trains = sorted(task.name for task in self._spec.tasks if not task.role.is_sidecar)
        if time.monotonic() - self._began < timeout_s or not self._behind.issuperset(trains):
            return None
        error = f"no task joined generation {self._generation} in {timeout_s:g} s: missing {', '.join(trains)}"
        return Stall(trains[0], error, "late")

    def describe_late(self, cause: str, *silent: str) -> str:
        """Return `cause`, extended by the late tasks for which others wait, if any; `silent` names silent tasks."""
        text = find_late(self._spec, self._run.heartbeats(), self._generation, silent)[1]
        return f"{cause}; {text}" if text else cause

    def longest_silent(self) -> tuple[str, float]:
        """Return the other task whose last heartbeat is oldest, and its age in seconds; an empty name if none runs.

        Tasks whose agents have reported an end are left out. The heartbeats come from the folder, since a task that
        froze or died a moment ago may still be connected to the hub. A network file system may hide a task's first
        heartbeat for a minute; until then a script's task counts as silent unless it is connected to the hub.
        """
        ages = {
            name: age_s
            for name, (hidden, age_s) in self._others().items()
            if not (hidden and self._run.is_connected(name))
        }
        return max(ages.items(), key=lambda each: each[1], default=("", 0.0))

    def suspect_others(self) -> None:
        """From now on, count another task as alive only once it writes a new heartbeat."""
        self._others_read_at = float("-inf")
        self._suspected_at = time.monotonic()
        self._others()
        self._renewed.clear()

    @property
    def all_are_alive(self) -> bool:
        """Whether every other task has, since `suspect_others`, written a heartbeat or reported its end.

        A task whose heartbeat is hidden counts as alive if it is still connected to the hub after `PROOF_S`, when the
        hub would have reported its loss.
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

    def _read(
        self, read: Callable[[str], Heartbeat | None], watched: Sequence[str], now: float, others_every_s: float
    ) -> dict[str, Heartbeat]:
        """Return this generation's heartbeats: the own and the chief's read now, the rest every `others_every_s`."""
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
        """Return, for each other running member, whether its heartbeat is hidden, and the heartbeat's age in seconds.

        A script starts only once every task has written a heartbeat, so a missing one is hidden. Another program may
        end before some tasks have started; these are left out.
        """
        now = time.monotonic()
        known = {self._task.name, *ends.ended_tasks(self._run.folder, self._generation)}
        beats = self._read(self._run.folder.heartbeat, self._names, now, EXAMINE_S)
        found = {}
        for name in (task.name for task in self._spec.members if task.name not in known):
            beat = beats.get(name)
            if self._scripted if beat is None else _is_running(beat):
                found[name] = beat is None, now - self._since(name, beat and beat.updated_at, now)
        return found

    def _vouch(self, beat: Heartbeat) -> None:
        if _is_running(beat):
            self._vouched_at = time.time()
            with contextlib.suppress(OSError):
                status = self._run.folder.status(beat.task)
                write_json(status, replace(beat, updated_at=self._vouched_at).to_json(), durable=False)

    def _written_at(self, beat: Heartbeat) -> Any:
        """Return the time in a heartbeat, or in the one before if this agent wrote it on behalf of its program."""
        return self._changed[beat.task][0] if beat.updated_at == self._vouched_at else beat.updated_at

    def _since(self, key: str, value: Any, now: float) -> float:
        """Return since when, on the monotonic clock, a value has been observed unchanged."""
        before = self._changed.get(key)
        if before is None or before[0] != value:
            self._changed[key] = (value, now)
            if before is not None and before[0] is not None:
                self._renewed.add(key)
        return self._changed[key][1]

    def _frozen(self, beats: dict[str, Heartbeat], ages: dict[str, float], now: float) -> Stall | None:
        for name, age in ages.items():
            mine = name == self._task.name
            quiet_s, patience_s = age, max(FROZEN_S, self._step_timeout_s(beats[name])) if mine else SILENT_S
            if beats[name].importing:  # no thread runs while a library is loaded from a slow disk
                patience_s = IMPORT_S
            if mine and beats[name].state == "waiting":  # the program has not written its first heartbeat yet
                quiet_s, patience_s = now - self._began, IMPORT_S
            counts = _is_running(beats[name]) and (mine or not self._spec.task(name).role.is_sidecar)
            if beats[name].state == TaskState.FAILED and not mine:
                counts, patience_s = not self._spec.restarts_alone(self._spec.task(name)), UNDECIDED_S
            if counts and quiet_s >= patience_s:
                return Stall(name, f"no heartbeat for {quiet_s:.0f} s", "frozen" if mine else "silent")
        # Without a rendezvous a task may never join the generation.
        waited_s = now - self._began
        late = sorted(name for name in self._behind if not self._spec.task(name).role.is_sidecar)
        if late and waited_s >= SILENT_S and standby_cluster.is_standby_generation(self._run.folder, self._generation):
            return Stall(late[0], f"it did not join generation {self._generation} in {waited_s:.0f} s", "silent")
        return None

    def _hanging(self, beats: dict[str, Heartbeat], now: float) -> Stall | None:
        """Return a stall if steps are overdue: the chief's agent checks for all tasks, the evaluator's for itself."""
        own = beats.get(self._task.name)
        if self._task.role not in (Role.CHIEF, Role.EVALUATOR) or own is None or not _is_running(own) or self._scripted:
            return None
        if own.state in START_STATES:  # time in all of these states counts towards the first step
            self._first_step_s = stuck_s = now - self._began
        elif self._task.role == Role.EVALUATOR:
            return None  # it may wait for checkpoints forever
        else:
            batch = own.position.batch if own.position else 0
            stuck_s = now - self._since("the step", (own.step, own.state, batch), now)
        if stuck_s < self._step_timeout_s(own):
            return None
        cause = f"no new step for {stuck_s:.0f} s (--hang-timeout) at step {own.step}"
        is_chief = self._task.role == Role.CHIEF
        late = find_late(self._spec, self._run.heartbeats(), self._generation)[0] if is_chief else []
        return Stall([*late, self._task.name][0], cause, "hang")

    def _step_timeout_s(self, beat: Heartbeat) -> float:
        slow = beat.state != TaskState.TRAINING
        return self.slow_timeout_s if slow else max(self._hang_timeout_s, 2 * self._first_step_s)


def _is_running(beat: Heartbeat) -> bool:
    return beat.state not in FINAL_STATES
