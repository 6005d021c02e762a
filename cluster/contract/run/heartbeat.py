"""The heartbeat of a task: its state, step and speed, written every second."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from cluster.contract.run.folder import FINAL_STATES, RunFolder
from cluster.contract.spec import Task
from cluster.system.json_files import write_json

HEARTBEAT_S = 1.0
"""Longest time between two heartbeats of a live task."""


class Heartbeat:
    """Writes `status/<task>.json`: at once when the state changes, and every second while the process runs.

    A background thread writes, so that updates do not wait for the disk. Heartbeats are not flushed to the disk: losing
    the newest in a power failure is harmless.
    """

    def __init__(self, run: RunFolder, task: Task, generation: int, restarts: int = 0) -> None:
        self._run, self._task = run, task.name
        self._lock = threading.Lock()
        """Guards the values; never held while a file is written."""
        self._writing = threading.Lock()
        """One write at a time."""
        self._due = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._handed_over = False
        self._written_at = 0.0
        self.values: dict[str, Any] = {
            "task": task.name,
            "role": task.role.value,
            "state": "starting",
            "generation": generation,
            "step": 0,
            "examples_per_s": None,
            "loss": None,
            "restarts": restarts,
            "step_ms": None,
            "input_share": None,
            "busy_share": None,
            "pace": None,
            "updated_at": 0.0,
        }

    def update(self, **values: Any) -> None:
        """Change the values of the next heartbeat; a change of state is written at once.

        Returns before that, except for a final state, since the process may end right after.
        """
        with self._lock:
            changed = values.get("state", self.values["state"]) != self.values["state"]
            self.values.update(values)
            state = self.values["state"]
        if not changed:
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
                self.values["updated_at"] = time.time()
                values = dict(self.values)
            self._written_at = values["updated_at"]
            write_json(self._run.status(self._task), values, durable=False)

    def start(self) -> Heartbeat:
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
        return written is not None and written["updated_at"] != self._written_at

    def _write_on(self) -> None:
        while not self._stopped:
            self._due.wait(HEARTBEAT_S)
            self._due.clear()
            if not self._stopped:
                self.write()
