"""What a task tells of itself while it lives: its state, its step and how fast it is."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from cluster.files import read_json, write_json
from cluster.runs import RunFolder
from cluster.spec import Task

HEARTBEAT_S = 1.0
"""Longest time between two heartbeats of a live task."""


class Heartbeat:
    """Writes `status/<task>.json`: at once when the state changes, and every second while the process lives."""

    def __init__(self, run: RunFolder, task: Task, generation: int, restarts: int = 0) -> None:
        self._path = run.status(task.name)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._handed_over = False
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
        """Change what the next heartbeat says; a change of state is written at once."""
        with self._lock:
            changed = values.get("state", self.values["state"]) != self.values["state"]
            self.values.update(values)
        if changed:
            self.write()

    def write(self) -> None:
        """Write the heartbeat now. A full disk must not end the process that reports it."""
        with self._lock, contextlib.suppress(OSError):
            if self._handed_over and read_json(self._path)["updated_at"] != self.values["updated_at"]:
                self._stop.set()  # its new owner has written
                return
            self.values["updated_at"] = time.time()
            write_json(self._path, self.values)

    def start(self) -> Heartbeat:
        """Go on writing in the background."""
        self.write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def hand_over(self) -> None:
        """Leave the file to another process: from its first heartbeat on, this one writes no more."""
        with self._lock:
            self._handed_over = True

    def stop(self) -> None:
        """Stop writing."""
        self._stop.set()
        if self._thread:
            self._thread.join()
            self._thread = None
            self.write()

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self.write()
