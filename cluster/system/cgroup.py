"""What the kernel tells a process of the memory of the container that it is in; outside of containers, of nothing.

Each file is that of cgroup v2, else that of v1.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def limit_bytes() -> int:
    """Return how much all processes here may use together; a very large number where there is no limit."""
    text = _read("memory.max", "memory/memory.limit_in_bytes").strip()
    return int(text) if text.isdecimal() else sys.maxsize


def room_bytes() -> int:
    """Return how much of that is left, what the kernel only keeps of files not counted."""
    used = _read("memory.current", "memory/memory.usage_in_bytes").strip()
    kept = _number(_read("memory.stat", "memory/memory.stat"), "inactive_file")
    return limit_bytes() - (int(used) if used.isdecimal() else 0) + kept


def kills() -> int:
    """Return how many processes the kernel has ended here because there was no memory left."""
    return _number(_read("memory.events", "memory/memory.oom_control"), "oom_kill")


def _read(v2: str, v1: str) -> str:
    for name in (v2, v1):
        try:
            return (ROOT / name).read_text()
        except OSError:
            continue
    return ""


def _number(text: str, name: str) -> int:
    """Return the number after a name, in a text of a name and a number a line; 0 without one."""
    fields = dict(words for line in text.splitlines() if len(words := line.split()) == 2)
    return int(fields.get(name, "0"))
