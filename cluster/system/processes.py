"""Operating-system processes: what one answers, how it ended in words, which one a recorded id means, who dies when."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import TimedOut

POLL_S = 0.02
"""Between two looks at a child, where the kernel cannot be asked to tell of its end."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_MEANINGS = {
    "SIGKILL": "killed",
    "SIGSEGV": "crashed in native code",
    "SIGABRT": "aborted in native code",
    "SIGTERM": "asked to end",
    "SIGBUS": "bus error",
}


def ask(command: Sequence[str], timeout_s: float, name: str = "") -> tuple[int, str, str]:
    """Run a program that may be missing, may not be allowed, or may hang.

    Args:
        command: the program and its words.
        timeout_s: after which it is ended.
        name: what it is called where it does not answer in time; empty: the program.

    Returns:
        Its exit code, and what it printed on stdout and on stderr. Where it has none, what a shell would give, and on
        stderr why.
    """
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            process_group=0,  # what it started in turn, such as a plugin, is ended with it
        ) as asked:
            try:
                printed, complained = asked.communicate(timeout=timeout_s)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(asked.pid, signal.SIGKILL)
                raise
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed"
    except PermissionError:
        return 126, "", f"{command[0]} may not be run by this user"
    except OSError as error:
        return 126, "", f"{command[0]} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, "", f"{name or command[0]} did not answer in {timeout_s:g} s"
    return asked.returncode, printed, complained


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that a killed agent leaves nothing behind.

    For `preexec_fn`: it runs between fork and exec, so it only makes one system call.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of every descendant whose own parent ends, daemons too."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("the kernel does not let this process adopt its descendants' orphans")


def as_exit_code(code: int) -> int:
    """Return what a shell would show: Python's -9 for a process ended by signal 9 is 137."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """Return an exit code or signal in words."""
    code = as_exit_code(code)
    with contextlib.suppress(ValueError):
        if code > 128:
            name = signal.Signals(code - 128).name
            return f"exit code {code} ({name}{': ' + _MEANINGS[name] if name in _MEANINGS else ''})"
    return f"exit code {code}"


def start_ticks(pid: int) -> int | None:
    """Return when the process began, in clock ticks since boot; None where there is no such process.

    A process id is used again after its process ended; the id and this together are not.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Return what the kernel tells of a process, from its state on; None of one that is not there or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


IDENTITY = ("pid", "start_ticks")


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped the process by a signal, such as SIGSTOP, and has not let it go on since."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal: one without it may end by it."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    return bool(int(fields.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def identity(pid: int) -> dict[str, int | None]:
    """Return what identifies the process for `alive` and `kill`."""
    return {"pid": pid, "start_ticks": start_ticks(pid)}


class Child(Protocol):
    """A process that this one started, as `subprocess.Popen` tells of it."""

    pid: int
    args: Any

    def poll(self) -> int | None:
        """Return the code that it ended with; None while it runs."""


def wait(child: Child, timeout_s: float | None = None) -> int:
    """Return the code that a child ended with, negative for a signal.

    The kernel wakes this process when that happens: `subprocess` looks every few milliseconds, and an agent waits for
    its program all day long, on the cores that this trains on.

    Raises:
        subprocess.TimeoutExpired: it goes on.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while (code := child.poll()) is None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired(child.args, timeout_s)
        try:
            descriptor = os.pidfd_open(child.pid)
        except OSError:  # an old kernel, or a sandbox
            time.sleep(POLL_S if left is None else min(POLL_S, left))
            continue
        try:
            ends = select.poll()
            ends.register(descriptor, select.POLLIN)
            ends.poll(None if left is None else left * 1000)
        finally:
            os.close(descriptor)
    return code


def alive(recorded: dict[str, int] | None) -> bool:
    """Whether the recorded process still runs."""
    if recorded is None or recorded["start_ticks"] is None:  # the latter: it had ended before it was recorded
        return False
    return start_ticks(recorded["pid"]) == recorded["start_ticks"]


def kill(recorded: dict[str, int] | None, number: int) -> bool:
    """Send a signal to the recorded process if it still runs; return whether it did."""
    if not recorded or not alive(recorded):
        return False
    try:
        descriptor = os.pidfd_open(recorded["pid"])
    except ProcessLookupError:
        return False
    except OSError:  # an old kernel, or a sandbox
        with contextlib.suppress(ProcessLookupError):
            os.kill(recorded["pid"], number)
        return True
    try:
        if not alive(recorded):  # asked again: from here on the descriptor is this process, whatever its id is used for
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


def available_bytes() -> int:
    """Return the memory of this machine that can be had without swapping."""
    return _meminfo("MemAvailable")


def total_bytes() -> int:
    """Return the memory of this machine."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


class Table:
    """The processes of this machine at one moment, this one excepted."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._identities: dict[int, dict[str, int]] = {}
        self._environments: dict[int, frozenset[bytes]] | None = None
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if pid != os.getpid() and (fields := _stat(pid)):
                self._identities[pid] = {"pid": pid, "start_ticks": int(fields[19])}
                self._children.setdefault(int(fields[1]), []).append(pid)

    def below(self, pid: int) -> set[int]:
        """Return the children of a process, theirs, and so on."""
        found: set[int] = set()
        new = [pid]
        while new:
            new = [child for each in new for child in self._children.get(each, []) if child not in found]
            found.update(new)
        return found

    def marked(self, name: str, value: str) -> set[int]:
        """Return the processes that were started with this environment variable."""
        if self._environments is None:
            self._environments = {pid: _environment(pid) for pid in self._identities}
        wanted = f"{name}={value}".encode()
        return {pid for pid, environment in self._environments.items() if wanted in environment}

    def kill(self, pid: int) -> None:
        """Kill one of these processes, unless it has ended since; never another that has its id now."""
        with contextlib.suppress(
            PermissionError
        ):  # another user's, as a setuid program is: it is still there next time
            kill(self._identities.get(pid), signal.SIGKILL)


def _environment(pid: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # ended meanwhile, or another user's
        return frozenset()


def kill_all(find: Callable[[Table], list[int]], what: str, timeout_s: float = 10.0) -> int:
    """Kill processes until there are none; return how many there were at first.

    Args:
        find: returns their ids in the order in which they are killed; the last is killed when it is alone, because
            the others may be known by it.
        what: whose they are, in words.
        timeout_s: after which those that remain are reported.

    Raises:
        TimedOut: some do not end.
    """
    deadline, first = time.monotonic() + timeout_s, None
    while left := find(table := Table()):
        first = len(left) if first is None else first
        if time.monotonic() > deadline:
            raise TimedOut(f"processes of {what} do not end: {', '.join(map(str, left))}; end them as their user")
        for pid in left[:-1] or left:
            table.kill(pid)
        time.sleep(0.02)
    return first or 0


def kill_with_environment(name: str, value: str, timeout_s: float = 10.0) -> int:
    """Kill every process that was started with this environment variable; return how many there were at first.

    Raises:
        TimedOut: some do not end.
    """
    return kill_all(lambda table: sorted(table.marked(name, value)), f"{name}={value}", timeout_s)
