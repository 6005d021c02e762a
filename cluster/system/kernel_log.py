"""What the kernel's log tells of processes that it killed, where this process may read it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

LOG = Path("/dev/kmsg")
FIRST_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's own process ids (PROC_PID_INIT_INO), which are those in the log."""
RECORD_BYTES = 8192
"""The kernel refuses to hand a record to a smaller buffer."""

_KILLED = re.compile(r"\d+,\d+,(?P<microseconds>\d+),.*[Oo]ut of memory: Killed process (?P<pid>\d+) ")


def killed_for_memory(pid: int, since_s: float) -> bool:
    """Whether the kernel says that it killed this process for want of memory.

    Args:
        pid: of a process of this machine.
        since_s: seconds since boot; what was killed before was another process with the same id.
    """
    with contextlib.suppress(OSError):
        if Path("/proc/self/ns/pid").stat().st_ino != FIRST_NAMESPACE:
            return False
        return any(
            int(match["pid"]) == pid and int(match["microseconds"]) / 1e6 >= since_s
            for record in _records()
            if (match := _KILLED.match(record))
        )
    return False


def _records() -> list[str]:
    """Return the log's records, oldest first."""
    found: list[str] = []
    descriptor = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                return found  # there are no more
            except BrokenPipeError:
                continue  # the kernel has overwritten this one meanwhile
            if not record:
                return found
            found.append(record.decode(errors="replace"))
    finally:
        os.close(descriptor)
