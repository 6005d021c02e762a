"""The ledger of the chief's time in one generation, which the run folder keeps even if the chief is killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json

WRITE_EVERY_S = 1.0


class Ledger:
    """Adds up the seconds of one generation, and writes them every second."""

    def __init__(self, run: RunFolder, generation: int, first: int) -> None:
        self._path = run.ledger(generation)
        self._seconds = {"input": 0.0, "compute": 0.0, "save": 0.0, "evaluate": 0.0}
        self._record: dict[str, Any] = {"generation": generation, "began": time.time(), "first_step_at": None}
        self._record |= {"first": first, "saves": {}}
        self._step, self._timed_steps = first, 0
        self._written = 0.0
        self._write()

    def first_step(self, step: int) -> None:
        """Record the end of the first step, which includes tracing and compiling."""
        self._record["first_step_at"] = time.time()
        self._step = step
        self._write()

    def steps(self, count: int, seconds: float, input_s: float) -> None:
        """Record further steps, their seconds, and the seconds of waiting for input."""
        self._step += count
        self._timed_steps += count
        self._seconds["input"] += input_s
        self._seconds["compute"] += seconds - input_s
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self._write()

    def saves(self, saves: dict[str, float | None]) -> None:
        """Record the interval of checkpoints and its parameters."""
        self._record["saves"] = saves

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time inside as `save` or `evaluate`."""
        began = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - began
        self._write()

    def _write(self) -> None:
        current = {"updated_at": time.time(), "step": self._step, "timed_steps": self._timed_steps}
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere
            write_json(self._path, self._record | current | {"seconds": self._seconds})
        self._written = time.monotonic()
