"""Operating-system processes: what one answers, how it ended in words, which one a recorded id means, who dies when."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import TimedOut

POLL_S = 0.02
"""Between two looks at a child, where the kernel cannot be asked to tell of its end."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed"
    except PermissionError:
        return 126, "", f"{command[0]} may not be run by this user"
    except OSError as error:
        return 126, "", f"{command[0]} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, "", f"{name or command[0]} did not answer in {timeout_s:g} s"
    return done.returncode, done.stdout, done.stderr


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that a killed agent leaves nothing behind.

    For `preexec_fn`: it runs between fork and exec, so it only makes one system call.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


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
    return recorded is not None and start_ticks(recorded["pid"]) == recorded["start_ticks"]


def kill(recorded: dict[str, int] | None, number: int) -> bool:
    """Send a signal to the recorded process if it still runs; return whether it did."""
    if not recorded or not alive(recorded):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(recorded["pid"], number)
    return True


def available_bytes() -> int:
    """Return the memory of this machine that can be had without swapping."""
    return _meminfo("MemAvailable")


def total_bytes() -> int:
    """Return the memory of this machine."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def with_environment(name: str, value: str) -> list[int]:
    """Return the processes that were started with this environment variable, this one excepted.

    It finds what a run started even where the process that started it is gone.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            pid = int(path.parent.name)
            if pid != os.getpid() and wanted in path.read_bytes().split(b"\0") and start_ticks(pid) is not None:
                found.append(pid)
    return found


def kill_with_environment(name: str, value: str, timeout_s: float = 10.0) -> int:
    """Kill every process that was started with this environment variable; return how many there were at first.

    Raises:
        TimedOut: some do not end.
    """
    deadline, first = time.monotonic() + timeout_s, None
    while left := with_environment(name, value):
        first = len(left) if first is None else first
        if time.monotonic() > deadline:
            raise TimedOut(f"processes with {name}={value} do not end: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return first or 0
