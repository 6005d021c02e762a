"""Heartbeats (the state, step and speed of a task, written every second), and the detection of silent tasks by them.

A task is silent if a watcher sees its heartbeat unchanged for too long, by the watcher's monotonic clock and only while
the watcher runs. The timestamps in heartbeats may come from other machines, or from before a clock was set or this
machine slept. They are displayed, but not decisive.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Self

from cluster.contract.run import claim
from cluster.contract.run.folder import LOST_AFTER_S, RunFolder
from cluster.contract.run.records import FINAL_STATES, AfterStop, Heartbeat, Position, TaskState
from cluster.contract.spec import Task
from cluster.system.json_files import write_json
from cluster.system.waiting import wait_until

HEARTBEAT_S = 1.0


def first_heartbeat(task: Task, generation: int, restarts: int) -> Heartbeat:
    """Return the initial heartbeat of a starting task, without writing it."""
    return Heartbeat(
        task=task.name, role=task.role, state=TaskState.STARTING, generation=generation, restarts=restarts, updated_at=0
    )


class HeartbeatWriter:
    """Writes `status/<task>.json`: immediately when the state changes, and every second while the process runs.

    A background thread does the writing, so that updates do not wait for the disk. Heartbeats are not flushed to the
    disk: losing the newest in a power failure is harmless.
    """

    def __init__(self, run: RunFolder, task: Task, generation: int, restarts: int = 0) -> None:
        self._run, self._task = run, task.name
        self._lock = threading.Lock()
        """Guards `current`; never held while a file is written."""
        self._writing = threading.Lock()
        self._due = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._handed_over = False
        self._written_at = 0.0
        self.position: Callable[[], Position | None] = lambda: None  # called for each heartbeat
        self.current = first_heartbeat(task, generation, restarts)

    def update(self, **values: Any) -> None:
        """Change values of the next heartbeat; a change of state is written immediately, by the background thread.

        A final state is written before the call returns, since the process may end right afterwards.
        """
        with self._lock:
            before, self.current = self.current.state, replace(self.current, **values)
            state = self.current.state
        if state == before:
            return
        if self._thread is None or state in FINAL_STATES:
            self.write()
        else:
            self._due.set()

    def write(self) -> None:
        """Write the heartbeat now. A full disk must not end the process."""
        with self._writing, contextlib.suppress(OSError):
            written = self._run.heartbeat(self._task) if self._handed_over else None
            if written and written.updated_at != self._written_at:  # by its new writer
                self._stopped = True
                self._due.set()
                return
            position = self.position()
            with self._lock:
                beat = self.current = replace(self.current, position=position, updated_at=time.time())
            self._written_at = beat.updated_at
            write_json(self._run.status(self._task), beat.to_json(), durable=False)

    def start(self) -> Self:
        self.write()
        self._thread = threading.Thread(target=self._write_regularly, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def hand_over(self) -> None:
        """Hand the file over to another process: stop writing once its first heartbeat is there."""
        self._handed_over = True

    def stop(self) -> None:
        self._stopped = True
        self._due.set()
        if self._thread:
            self._thread.join()
            self._thread = None
            self.write()

    def _write_regularly(self) -> None:
        while not self._stopped:
            self._due.wait(HEARTBEAT_S)
            self._due.clear()
            if not self._stopped:
                self.write()


HANG_TIMEOUT_S = 60.0
"""Default of `--hang-timeout`: a task without a new step for this long counts as hanging."""
SLOW_FACTOR = 10
"""Multiplies the hang timeout for the first step of a generation, for saving and for a batch of an evaluation."""

LONGEST_LOOK_S = 1.0
"""The most that a single gap between a watcher's observations counts as silence: in a longer one it was held up."""

SECOND_LOOK_S = 3 * HEARTBEAT_S
"""How long a single check watches tasks whose newest heartbeat seems old."""
POLL_S = 0.1


def slow_timeout_s(run: RunFolder) -> float:
    """Return the longest time for a first step, for saving or for a batch of an evaluation, in seconds."""
    return SLOW_FACTOR * (run.started.hang_timeout_s or HANG_TIMEOUT_S)


class LivenessMonitor:
    """Watches the heartbeats of a run, by a monotonic clock in seconds."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._looked = clock()
        self._generation = -1
        self._seen: dict[str, Heartbeat] = {}
        self._silent_s: dict[str, float] = {}
        self.silence_s = 0.0
        """Seconds since the last heartbeat of any task or the last new generation."""

    @property
    def begun(self) -> bool:
        """Whether any task has written a heartbeat."""
        return bool(self._seen)

    def look(self) -> dict[str, Heartbeat]:
        """Read the heartbeats; return them, with the state `lost` for silent tasks. To be called often."""
        now = self._clock()
        passed_s, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        beats = self._run.heartbeats()
        generation = self._run.generation
        changed = {name for name, beat in beats.items() if self._seen.get(name) != beat}
        self.silence_s = 0.0 if changed or generation != self._generation else self.silence_s + passed_s
        self._generation = generation
        self._silent_s = {name: 0.0 if name in changed else self._silent_s[name] + passed_s for name in beats}
        self._seen = beats
        return with_lost(beats, {name for name, silent_s in self._silent_s.items() if silent_s > LOST_AFTER_S})


def read_live_heartbeats(run: RunFolder, *names: str) -> dict[str, Heartbeat]:
    """Return all tasks' newest heartbeats, with the state `lost` for tasks that are silent.

    A task whose heartbeat seems old, or from the future, is watched for `SECOND_LOOK_S` before it counts as lost. With
    `names`, only the named tasks are checked.
    """
    beats = run.heartbeats()
    running = {name: beat for name, beat in beats.items() if beat.state not in FINAL_STATES}
    old = {name: beat for name, beat in running.items() if seems_old(beat) and (not names or name in names)}
    deadline = time.monotonic() + SECOND_LOOK_S
    while old and time.monotonic() < deadline:
        time.sleep(POLL_S)
        beats = run.heartbeats()
        old = {name: beat for name, beat in old.items() if beats.get(name) == beat}
    return with_lost(beats, old)


def is_silent(run: RunFolder) -> bool:
    """Return whether no task of a run writes heartbeats: none has started yet, or all have ended.

    A run that is being scaled does not count as silent, although it may have no live task for a moment.
    """
    if claim.is_scaling(run):
        return False
    beats = run.heartbeats()
    if any(beat.state not in FINAL_STATES and not seems_old(beat) for beat in beats.values()):
        return False
    return not beats or not wait_until(lambda: run.heartbeats() != beats, SECOND_LOOK_S, POLL_S)


def final_state(run: RunFolder) -> str | None:
    """Return how a run ended, even without a summary; None while it continues."""
    if summary := run.load_summary():
        return summary.state
    outcome = run.outcome
    if not outcome or (run.continues_elsewhere and (run.after_stop == AfterStop.REQUEUE or claim.is_scaling(run))):
        return None
    return outcome.state


def with_lost(beats: dict[str, Heartbeat], lost: Collection[str]) -> dict[str, Heartbeat]:
    """Return the heartbeats, with the state `lost` for the tasks in `lost` that have not ended."""
    return {
        name: replace(beat, state=TaskState.LOST) if name in lost and beat.state not in FINAL_STATES else beat
        for name, beat in beats.items()
    }


def seems_old(beat: Heartbeat) -> bool:
    """Return whether the timestamp of a heartbeat is far from this machine's time."""
    return abs(time.time() - beat.updated_at) > LOST_AFTER_S
