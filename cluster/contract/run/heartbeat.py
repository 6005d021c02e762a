"""Heartbeats: the state, step and speed of a task, written every second; and liveness, judged by them.

A task is silent if a watcher sees its heartbeat unchanged, timed by the watcher's own clock, and only while it could
look. The times in heartbeats may come from other machines, or from before a clock was set or this machine slept. They
are shown, but decide nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from cluster.contract.run import claim
from cluster.contract.run.folder import LOST_AFTER_S, RunFolder
from cluster.contract.run.records import FINAL_STATES, AfterStop, Heartbeat, Position, TaskState
from cluster.contract.spec import Task
from cluster.system.json_files import write_json
from cluster.system.waiting import wait_until

HEARTBEAT_S = 1.0
"""Longest time between two heartbeats of a live task."""


def first_heartbeat(task: Task, generation: int, restarts: int) -> Heartbeat:
    """Return the heartbeat of a task that starts; it has not been written yet."""
    return Heartbeat(
        task=task.name,
        role=task.role.value,
        state=TaskState.STARTING,
        generation=generation,
        restarts=restarts,
        updated_at=0.0,
    )


class HeartbeatWriter:
    """Writes `status/<task>.json`: at once when the state changes, and every second while the process runs.

    A background thread writes, so that updates do not wait for the disk. Heartbeats are not flushed to the disk: losing
    the newest in a power failure is harmless.
    """

    def __init__(self, run: RunFolder, task: Task, generation: int, restarts: int = 0) -> None:
        self._run, self._task = run, task.name
        self._lock = threading.Lock()
        """Guards `current`; never held while a file is written."""
        self._writing = threading.Lock()
        """One write at a time."""
        self._due = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._handed_over = False
        self._written_at = 0.0
        self.position: Callable[[], Position | None] = lambda: None  # called for each heartbeat
        self.current = first_heartbeat(task, generation, restarts)
        """The next heartbeat."""

    def update(self, **values: Any) -> None:
        """Change the values of the next heartbeat; a change of state is written at once.

        Returns before that, except for a final state, since the process may end right after.
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
            if written and written.updated_at != self._written_at:  # by its new owner
                self._stopped = True
                self._due.set()
                return
            position = self.position()
            with self._lock:
                beat = self.current = replace(self.current, position=position, updated_at=time.time())
            self._written_at = beat.updated_at
            write_json(self._run.status(self._task), beat.to_json(), durable=False)

    def start(self) -> HeartbeatWriter:
        self.write()
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def hand_over(self) -> None:
        """Hand the file over to another process: stop writing at its first heartbeat."""
        self._handed_over = True

    def stop(self) -> None:
        self._stopped = True
        self._due.set()
        if self._thread:
            self._thread.join()
            self._thread = None
            self.write()

    def _write_on(self) -> None:
        while not self._stopped:
            self._due.wait(HEARTBEAT_S)
            self._due.clear()
            if not self._stopped:
                self.write()


HANG_TIMEOUT_S = 60.0
"""How long a task may take no step before it counts as hanging, unless `--hang-timeout` says otherwise."""

LONGEST_LOOK_S = 1.0
"""A watcher that did not look for longer was held up itself; only this much of the time counts as silence."""

SECOND_LOOK_S = 3 * HEARTBEAT_S
"""How long a single look watches tasks whose newest heartbeat seems old."""
POLL_S = 0.1


class LivenessMonitor:
    """Watches the heartbeats of a run."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to watch; `clock` returns the seconds of a clock that never jumps."""
        self._run, self._clock = run, clock
        self._looked = clock()
        self._generation = -1
        self._seen: dict[str, Heartbeat] = {}
        self._silent_s: dict[str, float] = {}
        self.silence_s = 0.0
        """Seconds without a heartbeat of any task and without a new generation."""

    @property
    def begun(self) -> bool:
        """Whether any task has written a heartbeat."""
        return bool(self._seen)

    def look(self) -> dict[str, Heartbeat]:
        """Look; return the newest heartbeats, with the state `lost` for silent tasks. To be called often."""
        now = self._clock()
        passed_s, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        beats = self._run.heartbeats()
        generation = self._run.generation
        changed = {name for name, beat in beats.items() if self._seen.get(name) != beat}
        self.silence_s = 0.0 if changed or generation != self._generation else self.silence_s + passed_s
        self._generation = generation
        self._silent_s = {name: 0.0 if name in changed else self._silent_s[name] + passed_s for name in beats}
        self._seen = beats
        lost = {name for name, silent_s in self._silent_s.items() if silent_s > LOST_AFTER_S}
        return with_lost(beats, lost)


def read_live_heartbeats(run: RunFolder, *names: str) -> dict[str, Heartbeat]:
    """Return the newest heartbeats, with the state `lost` for silent tasks, of all tasks or of those named.

    A task whose heartbeat seems old, or from the future, is watched for `SECOND_LOOK_S` before it counts as lost.
    """
    beats = run.heartbeats()
    watched = {name for name, beat in beats.items() if beat.state not in FINAL_STATES and (not names or name in names)}
    doubtful = {name for name in watched if seems_old(beats[name])}
    first = {name: beats[name] for name in doubtful}
    deadline = time.monotonic() + SECOND_LOOK_S
    while doubtful and time.monotonic() < deadline:
        time.sleep(POLL_S)
        beats = run.heartbeats()
        doubtful = {name for name in doubtful if beats.get(name) == first[name]}
    return with_lost(beats, doubtful)


def is_silent(run: RunFolder) -> bool:
    """Return whether no task of a run writes heartbeats: none has started yet, or all have ended.

    A run that is being scaled is not silent, although none of its tasks may be alive for a moment.
    """
    if claim.is_scaling(run):
        return False
    beats = run.heartbeats()
    if any(beat.state not in FINAL_STATES and not seems_old(beat) for beat in beats.values()):
        return False
    return not beats or not wait_until(lambda: run.heartbeats() != beats, SECOND_LOOK_S, POLL_S)


def final_state(run: RunFolder) -> str | None:
    """Return how a run ended, also if nobody has written its summary; None while it continues."""
    if summary := run.load_summary():
        return summary.state
    outcome = run.outcome
    if not outcome or (run.continues_elsewhere and (run.after_stop == AfterStop.REQUEUE or claim.is_scaling(run))):
        return None
    return outcome.state


def with_lost(beats: dict[str, Heartbeat], lost: Collection[str]) -> dict[str, Heartbeat]:
    """Return the heartbeats, with the state `lost` for these tasks unless they have ended."""
    return {
        name: replace(beat, state=TaskState.LOST) if name in lost and beat.state not in FINAL_STATES else beat
        for name, beat in beats.items()
    }


def seems_old(beat: Heartbeat) -> bool:
    """Return whether a heartbeat is not recent, by the clocks."""
    return abs(time.time() - beat.updated_at) > LOST_AFTER_S
