"""The processes of this machine: whose children they are, their environments, and how to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cluster.system import processes
from cluster.system.errors import TimedOut


class ProcessTable:
    """The processes of this machine at one moment, except this one."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._identities: dict[int, dict[str, int]] = {}
        self._environments: dict[int, frozenset[bytes]] | None = None
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if pid != os.getpid() and (fields := processes.stat(pid)) and fields[0] not in "ZX":
                self._identities[pid] = {"pid": pid, "start_ticks": int(fields[19])}
                self._children.setdefault(int(fields[1]), []).append(pid)

    def descendants(self, pid: int) -> set[int]:
        """Return the children of a process, their children, and so on."""
        descendants: set[int] = set()
        level = [pid]
        while level:
            level = [child for each in level for child in self._children.get(each, []) if child not in descendants]
            descendants.update(level)
        return descendants

    def with_environment(self, name: str, value: str) -> set[int]:
        """Return the processes that were started with this environment variable."""
        if self._environments is None:
            self._environments = {pid: _environment(pid) for pid in self._identities}
        variable = f"{name}={value}".encode()
        return {pid for pid, environment in self._environments.items() if variable in environment}

    def kill(self, pid: int) -> None:
        """Kill one of these processes unless it has ended since; never another that was given its id."""
        with contextlib.suppress(PermissionError):  # another user's, as a setuid program is
            processes.kill(self._identities.get(pid), signal.SIGKILL)


def _environment(pid: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or is another user's
        return frozenset()


def kill_all(find: Callable[[ProcessTable], list[int]], what: str, timeout_s: float = 10.0) -> int:
    """Kill processes until `find` returns none; return how many it returned at first.

    Args:
        find: returns the ids in the order in which to kill them. The last is killed once it is the only one, because
            the others may be recognized by it.
        what: whose processes they are, for the error.
        timeout_s: how long to try.

    Raises:
        TimedOut: some do not end.
    """
    deadline, first = time.monotonic() + timeout_s, None
    while left := find(table := ProcessTable()):
        first = len(left) if first is None else first
        if time.monotonic() > deadline:
            raise TimedOut(f"processes of {what} do not end: {', '.join(map(str, left))}; end them as their user")
        for pid in left[:-1] or left:
            table.kill(pid)
        time.sleep(processes.POLL_S)
    return first or 0


def kill_with_environment(name: str, value: str, timeout_s: float = 10.0) -> int:
    """Kill every process that was started with this environment variable; return how many there were at first.

    Raises:
        TimedOut: some do not end.
    """
    return kill_all(lambda table: sorted(table.with_environment(name, value)), f"{name}={value}", timeout_s)
