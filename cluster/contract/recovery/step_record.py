"""The last step of each task, recorded so that a SIGKILL cannot lose it.

A heartbeat is up to a second old, which can be many steps. So a training program overwrites one fixed-width line after
every call of its inner loop. Once the write returns, the kernel has the line, so the line survives the process. It is
not flushed to the disk: a task whose machine is lost did not fail by itself. A checksum detects torn writes.
"""

import contextlib
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.system.files import make_folder, open_file

_READS = 5
"""Number of attempts to read a line that may be changing."""


@dataclass(frozen=True)
class RecordedStep:
    """The last step that a task did."""

    generation: int
    step: int


class StepRecord:
    """Writes a task's record, one writer at a time. The file stays open as long as this object exists."""

    def __init__(self, run: RunFolder, task: str, generation: int) -> None:
        self._generation = generation
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):  # a full disk must not end the training
            make_folder(_path(run, task).parent)
            open_file(_path(run, task), "ab").close()  # creates it
            with open_file(_path(run, task), "r+b") as file:
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)

    def done(self, step: int) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _line(self._generation, step), 0)


def read_step(run: RunFolder, task: str) -> RecordedStep | None:
    """Return a task's record; None without a valid one."""
    for _ in range(_READS):
        try:
            with open_file(_path(run, task), "rb") as file:
                line = file.read(_WIDTH + 1)
        except OSError:
            return None
        with contextlib.suppress(ValueError):
            generation, step = (int(word) for word in line.split()[:2])
            if line == _line(generation, step):
                return RecordedStep(generation, step)
    return None


def last_step(run: RunFolder, task: str, generation: int) -> int:
    """Return the last step of a task in this generation; -1 if it did none."""
    progress = read_step(run, task)
    return progress.step if progress and progress.generation == generation else -1


def newest_step(run: RunFolder, generation: int) -> int:
    """Return the last step of any task in this generation; -1 if none did any."""
    return max(last_step(run, task.name, generation) for task in run.load_cluster().tasks)


def single_steps(
    run: RunFolder,
    generation: int,
    steps_per_loop: int,
    everyones: Callable[[int], Sequence[int]] = lambda first: [first],
) -> range:
    """Return the range of steps in which a generation's tasks return to Python after every single step.

    Steps are recorded when the inner loop returns, after at most `steps_per_loop` steps. After a failure, the next
    attempts run single steps from the last recorded step to the end of that call of the loop. So they record the exact
    step, which shows whether it fails again. All tasks must use the same range, or they would deadlock, even if the
    generation's record is not visible on every host yet. So they agree on it by the collective operation `everyones`,
    which returns the numbers of all tasks, given that of this task.
    """
    record = run.generation_record(generation)
    first = -1 if record is None or record.single_steps_from is None else record.single_steps_from
    first = max(everyones(first))
    return range(0) if first < 0 else range(first, first + steps_per_loop)


def _line(generation: int, step: int) -> bytes:
    numbers = f"{generation:>10} {step:>20}"
    return f"{numbers} {zlib.crc32(numbers.encode()):08x}\n".encode()


_WIDTH = len(_line(0, 0))


def _path(run: RunFolder, task: str) -> Path:
    return run.control / "steps" / task
