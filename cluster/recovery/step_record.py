"""The step that each task has really done, kept where a SIGKILL cannot lose it.

A heartbeat is up to a second old, which is many steps. So a training program overwrites one line of fixed width after
every call of its inner loop. Once the write has returned the line is the kernel's: it outlives the process, and needs
no flush to disk, since a task whose machine is lost did not fail by itself. A checksum tells a torn line from a whole.
"""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.run import records
from cluster.run.folder import RunFolder
from cluster.system.files import make_folder, open_file

_READS = 5
"""How often a line is read that somebody may be writing right now."""

SINGLE_STEPS_FROM = "single_steps_from"
"""What the record of a generation that a failure began calls the step from which on it goes step by step."""


@dataclass(frozen=True)
class Done:
    """How far a task came."""

    generation: int
    step: int


class StepRecord:
    """Writes one task's record; it has one writer at a time. The file is open as long as this object lives."""

    def __init__(self, run: RunFolder, task: str, generation: int) -> None:
        self._generation = generation
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):  # a full disk: the training must not end for its record
            make_folder(_path(run, task).parent)
            open_file(_path(run, task), "ab").close()  # creates it
            with open_file(_path(run, task), "r+b") as file:
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)

    def done(self, step: int) -> None:
        """Record that this many steps are done."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _line(self._generation, step), 0)


def read(run: RunFolder, task: str) -> Done | None:
    """Return how far a task came last; None where it never said so."""
    for _ in range(_READS):
        try:
            with open_file(_path(run, task), "rb") as file:
                line = file.read(_WIDTH + 1)
        except OSError:
            return None
        with contextlib.suppress(ValueError):
            generation, step = (int(word) for word in line.split()[:2])
            if line == _line(generation, step):
                return Done(generation, step)
    return None


def furthest(run: RunFolder, task: str, generation: int) -> int:
    """Return the steps that a task has done in this generation; -1 where it came to none."""
    done = read(run, task)
    return done.step if done and done.generation == generation else -1


def newest(run: RunFolder, generation: int) -> int:
    """Return the most steps that any task has done in this generation; -1 where none came to any."""
    names = [task.name for task in run.load_cluster().tasks]
    return max(furthest(run, name, generation) for name in names)


def single_steps(run: RunFolder, generation: int, steps_per_loop: int) -> range:
    """Return the steps after which the tasks of a generation come back to Python one by one.

    A step is recorded once the call of the inner loop is over that it is in. After a failure the next attempts go step
    by step from the last one recorded to where that call would have ended: so they record the true step, and fail at
    the very same one if it is to blame. Every task of the generation reads the same.
    """
    first = generation_record(run, generation).get(SINGLE_STEPS_FROM)
    return range(0) if first is None else range(first, first + steps_per_loop)


def generation_record(run: RunFolder, generation: int) -> dict[str, Any]:
    """Return why and how a generation was begun."""
    path = run.control / "generations" / f"{generation}.json"
    begun: dict[str, Any] = records.read(path, records.generation(generation), {})
    return begun


def _line(generation: int, step: int) -> bytes:
    numbers = f"{generation:>10} {step:>20}"
    return f"{numbers} {zlib.crc32(numbers.encode()):08x}\n".encode()


_WIDTH = len(_line(0, 0))


def _path(run: RunFolder, task: str) -> Path:
    return run.control / "steps" / task
