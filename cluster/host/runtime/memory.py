"""Memory of tasks: the limit of each container, so that a growing one fails alone, and what processes need free.

Without `--memory` the tasks of a run share nine tenths of the machine's memory evenly, which leaves room for the engine
and its callers. Swap is off: a task that swaps would slow down all tasks that wait for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.system import memory
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.messages import counted

TASK_MEMORY_BYTES = 600 * 2**20
"""What a TensorFlow process uses before it trains anything."""
SHARED = 0.9
"""The part of the machine's memory that the tasks of a run share."""
UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Memory:
    """What the tasks of a run may use."""

    requested: str = ""
    """As typed; empty: a share of what there is."""
    task_bytes: int = 0
    """What each of them may use; 0 for local processes, which have no limit."""
    total_bytes: int = 0
    """What the engine's machine has."""

    def check(self, num_tasks: int) -> None:
        """Check that the tasks fit.

        Raises:
            PrerequisiteError: they do not.
        """
        if self.requested and num_tasks * self.task_bytes > self.total_bytes:
            raise PrerequisiteError(
                f"--memory {self.requested} for {counted(num_tasks, 'task')} makes "
                f"{shown(num_tasks * self.task_bytes)}, "
                f"the engine's machine has {shown(self.total_bytes)}; use --memory "
                f"{self.total_bytes // num_tasks // 2**20}MiB, or fewer tasks"
            )
        if self.task_bytes < TASK_MEMORY_BYTES:
            shared = int(self.total_bytes * SHARED)
            raise PrerequisiteError(
                f"{counted(num_tasks, 'task')} that share {shown(shared)} of memory get {shown(self.task_bytes)} each, "
                f"and TensorFlow alone takes {shown(TASK_MEMORY_BYTES)}; use at most "
                f"{counted(shared // TASK_MEMORY_BYTES, 'task')} here"
            )


def check_free(num_tasks: int, ending: int = 0) -> None:
    """Check that the TensorFlow processes of tasks without a limit fit into the free memory.

    Args:
        num_tasks: to be started.
        ending: tasks that end before, and whose memory is free then.

    Raises:
        PrerequisiteError: they do not.
    """
    available = memory.available_bytes() + ending * TASK_MEMORY_BYTES
    if num_tasks * TASK_MEMORY_BYTES > available:
        raise PrerequisiteError(
            f"{counted(num_tasks, 'task')} need about {num_tasks * TASK_MEMORY_BYTES / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are free; use at most {counted(available // TASK_MEMORY_BYTES, 'task')} here"
        )


def of_containers(requested: str, num_tasks: int, total_bytes: int) -> Memory:
    """Return what each of a run's containers may use: what was requested, or its share of the machine's memory."""
    return Memory(requested, parse(requested) or int(total_bytes * SHARED) // num_tasks, total_bytes)


def parse(text: str) -> int:
    """Return a memory limit in bytes; 0 where none was requested.

    Raises:
        UsageError: it is no amount, or less than a task needs.
    """
    if not text:
        return 0
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(MiB|GiB|TiB)", text, re.IGNORECASE | re.ASCII)
    if not match:
        raise UsageError(f"--memory {text!r}: expected a number and MiB, GiB or TiB, such as 8GiB or 1500MiB")
    size_bytes = int(float(match[1]) * UNITS[match[2].lower()])
    if size_bytes < TASK_MEMORY_BYTES:
        raise UsageError(
            f"--memory {text!r}: expected at least {TASK_MEMORY_BYTES // 2**20}MiB, what TensorFlow alone takes, and "
            "at most what the machine has; use such as 8GiB or 1500MiB"
        )
    return size_bytes


def shown(size_bytes: int) -> str:
    """Return a size in words."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"
