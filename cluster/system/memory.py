"""The memory of this machine and of this process's container, and the kernel's out-of-memory kills."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
PRESSURE = Path("/proc/pressure/memory")
SHORT_BYTES, SHORT_WAITS = 2**30, 5.0
"""Thresholds of short memory: available bytes, or per cent of the last ten seconds in which a process waited for it."""
KERNEL_LOG = Path("/dev/kmsg")
FIRST_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's initial PID namespace (PROC_PID_INIT_INO), whose ids are in the kernel's log."""
LOG_RECORD_BYTES = 8192
"""The buffer size for a log record; the kernel refuses a smaller one."""

_KILLED = re.compile(r"\d+,\d+,(?P<microseconds>\d+),.*[Oo]ut of memory: Killed process (?P<pid>\d+) ")


def total_bytes() -> int:
    """Return the memory of this machine."""
    return _meminfo("MemTotal")


def available_bytes() -> int:
    """Return the memory of this machine that is available without swapping."""
    return _meminfo("MemAvailable")


def used_bytes(pid: int) -> int:
    """Return the resident memory of a process, including shared memory; 0 once the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _meminfo(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def limit_bytes() -> int:
    """Return the memory limit of this container, job or service; a very large number if there is none."""
    return min(map(_limit, _groups()))


def headroom_bytes() -> int:
    """Return the unused part of the memory limit, in bytes. Inactive page cache counts as unused."""
    return min(_limit(group) - _used(group) for group in _groups())


def free_bytes() -> int:
    """Return the memory that this process may still take: of this machine, and within the limit of its container."""
    return min(available_bytes(), headroom_bytes())


def is_short() -> bool:
    """Whether memory is short, by `SHORT_BYTES` or `SHORT_WAITS`."""
    waits = re.search(r"some avg10=([0-9.]+)", _own("memory.pressure", str(PRESSURE)))
    return free_bytes() < SHORT_BYTES or (waits is not None and float(waits[1]) > SHORT_WAITS)


def kills() -> int:
    """Return how many processes of this process's cgroup the kernel has killed for lack of memory."""
    return _counter(_own("memory.events", "memory.oom_control"), "oom_kill")


def _groups() -> list[Path]:
    """Return the folders of this process's cgroup and of those around it, the own first, as far as they are visible.

    A container sees its cgroup as the outermost one. The jobs of Slurm and the services of systemd see all.
    """
    found, text = list[Path](), ""
    with contextlib.suppress(OSError):
        text = OWN_GROUPS.read_text()
    for root, controller in ((CGROUP, ""), (CGROUP / "memory", "memory")):  # v2, v1
        lines = (line.split(":", 2) for line in text.splitlines())
        own = next((root / path[1:] for _, names, path in lines if controller in names.split(",")), root)
        found += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return found


def _own(v2: str, v1: str) -> str:
    """Return the text of a file of the cgroup to which this process's memory counts; empty if there is none."""
    return next(filter(None, (_read(group, v2, v1) for group in _groups())), "")


def _limit(group: Path) -> int:
    text = _read(group, "memory.max", "memory.limit_in_bytes").strip()
    return int(text) if text.isdecimal() else sys.maxsize


def _used(group: Path) -> int:
    used = _read(group, "memory.current", "memory.usage_in_bytes").strip()
    stat = _read(group, "memory.stat", "memory.stat")
    cached = _counter(stat, "total_inactive_file") or _counter(stat, "inactive_file")  # v1's with those inside; v2's
    return (int(used) if used.isdecimal() else 0) - cached


def _read(group: Path, v2: str, v1: str) -> str:
    """Return the text of a cgroup's file, by its name in v2 or v1; empty if neither exists."""
    for name in (v2, v1):
        with contextlib.suppress(OSError):
            return (group / name).read_text()
    return ""


def _counter(text: str, name: str) -> int:
    fields = dict(words for line in text.splitlines() if len(words := line.split()) == 2)
    return int(fields.get(name, "0"))


def in_kernel_log(pid: int, since_s: float) -> bool:
    """Return whether the kernel's log reports that a process was killed for memory; False if it is unreadable.

    A record from before `since_s`, in seconds since boot, is about another process with the same id.
    """
    with contextlib.suppress(OSError):
        if Path("/proc/self/ns/pid").stat().st_ino != FIRST_NAMESPACE:
            return False
        return any(
            int(match["pid"]) == pid and int(match["microseconds"]) / 1e6 >= since_s
            for record in _log_records()
            if (match := _KILLED.match(record))
        )
    return False


def _log_records() -> Iterator[str]:
    with open(KERNEL_LOG, "rb", 0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as log:
        while True:
            with contextlib.suppress(BrokenPipeError):  # the kernel has overwritten this record
                if not (record := log.read(LOG_RECORD_BYTES)):
                    return
                yield record.decode(errors="replace")
