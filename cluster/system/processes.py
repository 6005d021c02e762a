"""Operating-system processes: starting, waiting, describing exit codes, identifying recorded processes, ending."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from cluster.system.errors import TimedOut
from cluster.system.files import ROOT
from cluster.system.waiting import Bell, wait_until

POLL_S = 0.02
"""Interval for polling a child if the kernel offers no descriptor to wait on."""

LOOK_S = 0.5
"""How often to check whether a process is stopped."""
AWAY_S = 4.0
"""A longer time between two checks means that this process was stopped itself."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

_MEANINGS = {
    "SIGKILL": "killed",
    "SIGSEGV": "crashed in native code",
    "SIGABRT": "aborted in native code",
    "SIGTERM": "asked to end",
    "SIGBUS": "bus error",
}


TIMED_OUT = 124
"""The exit code of `run` for a program that did not end in time."""


def run(command: Sequence[str], timeout_s: float, name: str = "", *, cwd: Path | None = None) -> tuple[int, str, str]:
    """Run a program that may be missing, forbidden or hang; kill it and its process group after `timeout_s`.

    Returns the exit code, stdout and stderr. If the program could not be run or did not end, the code is that of a
    shell (127, 126 or `TIMED_OUT`) and stderr has the reason, in which `name` is the program's.
    """
    try:
        with subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            process_group=0,  # its children, such as a plugin, are killed with it
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                signal_group(process, signal.SIGKILL)
                raise
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed"
    except PermissionError:
        return 126, "", f"{command[0]} may not be run by this user"
    except OSError as error:
        return 126, "", f"{command[0]} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return TIMED_OUT, "", f"{name or command[0]} did not answer in {timeout_s:g} s"
    return process.returncode, output, errors


def start_detached(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in the checkout, in a separate session: it gets no Ctrl-C and may survive this process.

    Without a file `output`, its output is discarded.
    """
    sink = output or subprocess.DEVNULL
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=stdin, stdout=sink, stderr=sink, start_new_session=True
    )


def die_with_parent() -> None:
    """Request that the kernel kills this process when its parent dies, so that a killed agent leaves nothing behind.

    For `preexec_fn`: it runs between fork and exec, so it makes only one system call.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_name(name: str) -> None:
    """Set this process's name in `top` and in the kernel's log, which have its first 15 bytes."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant, including daemons."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("the kernel does not let this process adopt its descendants' orphans")


def as_exit_code(code: int) -> int:
    """Return the exit code that a shell would show: 137 for Python's -9, a process ended by signal 9."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """Describe an exit code or signal in words."""
    code = as_exit_code(code)
    with contextlib.suppress(ValueError):
        if code > 128:
            name = signal.Signals(code - 128).name
            return f"exit code {code} ({name}{': ' + _MEANINGS[name] if name in _MEANINGS else ''})"
    return f"exit code {code}"


class Child(Protocol):
    """A process that this one started: a `subprocess.Popen` or a `ForkedProcess`."""

    pid: int
    args: Any
    returncode: int | None
    """The exit code, negative for a signal; None until `poll` has reaped the process."""

    def poll(self) -> int | None:
        """Reap the process and return its exit code; None while it runs."""


def has_ended(child: Child) -> bool:
    """Return whether a child has ended, without reaping it."""
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has been reaped elsewhere
        return True


def signal_group(child: Child, number: int) -> None:
    """Send a signal to the process group that a child leads, unless the child has been reaped.

    The kernel may reuse the id of a reaped process, and so its group's. A child that has ended keeps its id until it is
    reaped, so `reap` ends the rest of the group first.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: a setuid program
            os.killpg(child.pid, number)
        if number == signal.SIGKILL:  # the child may have left its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child.pid, number)


def reap(child: Child) -> int | None:
    """Return the exit code of a child, after killing the rest of its process group; None while the child runs."""
    if child.returncode is None and has_ended(child):
        signal_group(child, signal.SIGKILL)
    return child.poll() if child.returncode is None else child.returncode


def wait(child: Child, timeout_s: float | None = None, bell: Bell | None = None) -> int:
    """Wait for a child and reap it; return its exit code, negative for a signal.

    Raises TimeoutExpired after a timeout, which `bell` ends early.

    Waits on a process descriptor: `subprocess` polls every few milliseconds, and an agent waits for its program all day
    on the cores on which the program trains.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while (code := reap(child)) is None:
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
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            if bell:
                end.register(bell, select.POLLIN)
            ready = dict(end.poll(None if left is None else left * 1000))
            if bell and bell.fileno() in ready:
                bell.silence()
                deadline = 0.0
        finally:
            os.close(descriptor)
    return code


def stat(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat`, beginning with the state; empty if the process does not exist."""
    return _proc_file(pid, "stat").rpartition(")")[2].split()


def _proc_file(pid: int, name: str) -> str:
    """Return the text of a file in `/proc/<pid>`; empty if the process has ended, or is another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="surrogateescape")
    return ""


def stopped_at(pid: int) -> int | None:
    """Return the CPU time of a process that a signal such as SIGSTOP has stopped, in clock ticks; None if it runs.

    Two equal results mean that the process did nothing in between, although it may have been continued.
    """
    fields = stat(pid)
    return int(fields[11]) + int(fields[12]) if fields and fields[0] in "Tt" else None


class StopTimer:
    """Measures for how long a signal has kept a process stopped, by polling it."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._clock: int | None = None
        self._seconds = 0.0

    def look(self, pid: int) -> float:
        """Poll the process; return for how many seconds it has been stopped, without gaps in the polling."""
        now = time.monotonic()
        passed_s = now - self._looked_at
        if passed_s >= LOOK_S:
            before, self._clock, self._looked_at = self._clock, stopped_at(pid), now
            if self._clock is None or self._clock != before:
                self._seconds = 0.0
            elif passed_s < AWAY_S:
                self._seconds += passed_s
        return self._seconds


def handles(pid: int, number: int) -> bool:
    """Return whether the process handles a signal, which could end it otherwise."""
    fields = dict(line.split(":", 1) for line in _proc_file(pid, "status").splitlines())
    return bool(int(fields.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def replace_variable(name: str, value: str) -> None:
    """Change a variable in this process's initial environment, as shown in `/proc`; it must have been there."""
    start, end = (int(field) for field in stat(os.getpid())[47:49])  # `env_start` and `env_end` of proc(5)
    before = b"\0" + ctypes.string_at(start, end - start)
    at = start + before.index(f"\0{name}=".encode()) + len(name) + 1
    ctypes.memmove(at, value.encode(), len(ctypes.string_at(at)))


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None if it does not exist or has ended."""
    fields = stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def identity(pid: int) -> dict[str, int | None]:
    """Return the record of a process for `alive` and `kill`: an id alone may be reused, but not with its start time."""
    return {"pid": pid, "start_ticks": start_ticks(pid)}


def alive(recorded: dict[str, int] | None) -> bool:
    """Return whether the recorded process still runs."""
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
        if not alive(recorded):  # again, now that the descriptor pins the process
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


def end(recorded: dict[str, int], timeout_s: float = 5.0) -> bool:
    """End the recorded process, by SIGKILL if SIGTERM does not end it in time; return whether it was still running."""
    ended = kill(recorded, signal.SIGTERM)
    if ended and not wait_until(lambda: not alive(recorded), timeout_s):
        kill(recorded, signal.SIGKILL)
        wait_until(lambda: not alive(recorded), timeout_s)
    return ended


class ProcessTable:
    """A snapshot of all processes of this machine except this one."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self.identities: dict[int, dict[str, int]] = {}
        self._environments: dict[int, list[str]] | None = None
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if pid != os.getpid() and (fields := stat(pid)) and fields[0] not in "ZX":
                self.identities[pid] = {"pid": pid, "start_ticks": int(fields[19]), "session": int(fields[3])}
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
            self._environments = {pid: _proc_file(pid, "environ").split("\0") for pid in self.identities}
        return {pid for pid, environment in self._environments.items() if f"{name}={value}" in environment}

    def kill(self, pid: int) -> None:
        """Kill one of these processes unless it has ended since; never another process that reuses its id."""
        with contextlib.suppress(PermissionError):  # another user's, such as a setuid program
            kill(self.identities.get(pid), signal.SIGKILL)


def kill_all(find: Callable[[ProcessTable], list[int]], what: str, timeout_s: float = 10.0) -> int:
    """Kill processes until `find` returns none; return the number that it returned first, or raise TimedOut.

    `find` returns ids in the order of killing. The last process is killed only once it is the only one, because `find`
    may need it to identify the others. `what` names the owner of the processes in the error.
    """
    deadline, first = time.monotonic() + timeout_s, None
    while left := find(table := ProcessTable()):
        first = len(left) if first is None else first
        if time.monotonic() > deadline:
            raise TimedOut(f"processes of {what} do not end: {', '.join(map(str, left))}; end them as their user")
        for pid in left[:-1] or left:
            table.kill(pid)
        time.sleep(POLL_S)
    return first or 0


def kill_session(session: int) -> None:
    """Kill every process of a session, whose number is the id of its first process."""
    for _ in range(2):  # one may have forked another before it was killed
        table = ProcessTable()
        for pid in [pid for pid, found in table.identities.items() if found["session"] == session]:
            table.kill(pid)


def kill_with_environment(name: str, value: str) -> int:
    """Kill every process that was started with this environment variable, by `kill_all`; return their number."""
    return kill_all(lambda table: sorted(table.with_environment(name, value)), f"{name}={value}")
