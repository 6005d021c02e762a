"""The heartbeat of a task: its state, step and speed, written every second."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import FINAL_STATES, Heartbeat, TaskState
from cluster.contract.spec import Task
from cluster.system.json_files import write_json

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
            if self._handed_over and self._has_new_owner():
                self._stopped = True
                self._due.set()
                return
            with self._lock:
                written = self.current = replace(self.current, updated_at=time.time())
            self._written_at = written.updated_at
            write_json(self._run.status(self._task), written.to_json(), durable=False)

    def start(self) -> HeartbeatWriter:
        """Start to write in the background."""
        self.write()
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def hand_over(self) -> None:
        """Hand the file over to another process: stop writing at its first heartbeat."""
        self._handed_over = True

    def stop(self) -> None:
        """Stop writing."""
        self._stopped = True
        self._due.set()
        if self._thread:
            self._thread.join()
            self._thread = None
            self.write()

    def _has_new_owner(self) -> bool:
        written = self._run.heartbeat(self._task)
        return written is not None and written.updated_at != self._written_at

    def _write_on(self) -> None:
        while not self._stopped:
            self._due.wait(HEARTBEAT_S)
            self._due.clear()
            if not self._stopped:
                self.write()
