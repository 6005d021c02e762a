"""Processes that begin as a copy of this one, with all that it has imported.

Importing TensorFlow is most of what a local task's start takes, and of its memory. So the supervisor imports it once:
agents are copies of the supervisor and programs are copies of their agents, as the kernel makes them (fork), which
takes a hundredth of a second and shares the memory that nobody writes to. A process that is copied must not have used
TensorFlow: its threads would be missing in the copy.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable
from typing import IO, Any, NoReturn

from cluster.system import processes

_preloaded = False


def preload(module: str, *arguments: object) -> None:
    """Call `load` of a module, which imports what others need; Python processes that `start` begins then are copies."""
    global _preloaded  # noqa: PLW0603  # it is a fact about this process
    importlib.import_module(module).load(*arguments)
    _preloaded = True


def start(command: list[str], **how: Any) -> subprocess.Popen[bytes] | Copy:
    """Start a process: a copy of this one where it can be one, otherwise a new one.

    Args:
        command: such as `[sys.executable, "-m", "train", "--run-dir", "runs/a"]`.
        how: as for `subprocess.Popen`; of these `Copy` knows what is in its signature.
    """
    if _preloaded and command[0] == sys.executable and command[1] in _RUN:
        return Copy(command, **how)
    return subprocess.Popen(command, **how)


class Copy:
    """A copy of this process that runs other Python code. To its parent it is what a `subprocess.Popen` is."""

    stdout: IO[bytes] | None = None
    """What it prints, where that is a pipe."""

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        stdin: int = subprocess.DEVNULL,
        cwd: None = None,
        pass_fds: tuple[int, ...] = (),
        process_group: int | None = None,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] = lambda: None,
    ) -> None:
        assert (stdin, cwd) == (subprocess.DEVNULL, None)
        self.args = command
        self.returncode: int | None = None
        null = os.open(os.devnull, os.O_RDWR)
        written = null
        if stdout == subprocess.PIPE:
            read, written = os.pipe()
            self.stdout = os.fdopen(read, "rb")
        elif not isinstance(stdout, int):
            written = stdout.fileno()
        errors = written if isinstance(stderr, int) else stderr.fileno()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what lies in their buffers is the parent's to write
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: none holds what the copy needs
            self.pid = os.fork()
        if self.pid == 0:
            try:
                preexec_fn()
                if os.getppid() != parent:  # it died before the kernel was asked to tell
                    os._exit(128 + signal.SIGKILL)
                if start_new_session:
                    os.setsid()
                elif process_group is not None:
                    os.setpgid(0, process_group)
                _forget_handlers()
                _keep_only((null, written, errors), pass_fds)
                os.environ.clear()
                os.environ.update(env)
                tempfile.tempdir = None  # it is remembered, and $TMPDIR may be another one now
                _run(command)
            finally:
                os._exit(1)
        if process_group is not None:
            with contextlib.suppress(OSError):  # the copy does it too: whoever is first
                os.setpgid(self.pid, process_group)
        os.close(null)
        if stdout == subprocess.PIPE:
            os.close(written)

    def poll(self) -> int | None:
        """Return the code that it ended with, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the code that it ended with.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        return processes.wait(self, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _forget_handlers() -> None:
    """Have signals do again what they do in a new process."""
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)


def _keep_only(streams: tuple[int, int, int], others: tuple[int, ...]) -> None:
    """Have these be standard input, output and errors, and close every other file but some."""
    for number, stream in enumerate([os.dup(stream) for stream in streams]):  # one may lie where another belongs
        os.dup2(stream, number)
    low = 3
    for kept in sorted(others):
        os.set_inheritable(kept, True)
        os.closerange(low, kept)
        low = kept + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
    # Those of the parent may hold a lock. Never closed: an object that goes out of use would take the file with it.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _run(command: list[str]) -> NoReturn:
    """Do what Python would do with these words, and end."""
    code = 1
    try:
        _RUN[command[1]](command[2:])
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code & 0xFF)


def _run_module(words: list[str]) -> None:
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run_code(words: list[str]) -> None:
    sys.argv = ["-c", *words[1:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(words[0], "<string>", "exec"), main.__dict__)  # noqa: S102  # as `python -c` does


_RUN: dict[str, Callable[[list[str]], None]] = {"-m": _run_module, "-c": _run_code}
