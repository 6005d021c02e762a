"""Starts Python processes by forking this process, including all modules that it has imported.

Importing TensorFlow takes most of the time and memory of a program's start. So it is imported once: by the supervisor
of local tasks, which forks the agents, which fork their programs; elsewhere by each agent. A fork takes a hundredth of
a second and shares all memory that is not written to. A process that forks must not have used TensorFlow, whose threads
would be missing in the child.
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
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

from cluster.system import processes

_preloaded = False


def preload(module: str, *arguments: object) -> None:
    """Call `load` of a module, which imports the modules of future forks. From then on `start` forks processes."""
    global _preloaded  # noqa: PLW0603  # a property of this process
    importlib.import_module(module).load(*arguments)
    _preloaded = True


def has_preloaded() -> bool:
    """Whether `start` forks Python processes."""
    return _preloaded


def start(command: list[str], *, fork: bool = False, **how: Any) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a process, forked from this one if it runs Python code and `preload` was called, or with `fork`.

    The options are those of `subprocess.Popen`; for a fork, only those of `ForkedProcess`.
    """
    if (fork or _preloaded) and command[0] == sys.executable and command[1] in _RUN:
        return ForkedProcess(command, **how)
    return subprocess.Popen(command, **how)


class ForkedProcess:
    """A fork of this process that runs other Python code, with the interface of `subprocess.Popen`."""

    stdout: IO[bytes] | None = None
    """The child's output, if it is a pipe."""

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
        written: int | None = None
        if stdout == subprocess.PIPE:
            read, written = os.pipe()
            self.stdout = os.fdopen(read, "rb")
        elif not isinstance(stdout, int):
            written = stdout.fileno()
        errors = written if isinstance(stderr, int) else stderr.fileno()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # the child would print the buffered text again
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has default handlers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: none holds a lock that the child needs
            try:
                self.pid = os.fork()
            finally:
                if os.getpid() == parent:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self.pid == 0:
            try:
                preexec_fn()
                if os.getppid() != parent:  # the parent died before `preexec_fn` ran
                    os._exit(128 + signal.SIGKILL)
                if start_new_session:
                    os.setsid()
                elif process_group is not None:
                    os.setpgid(0, process_group)
                _reset_handlers()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                _set_files((None, written, errors), pass_fds)
                os.environ.clear()
                os.environ.update(env)
                processes.set_name(env.get("TASK", "tf-cluster"))  # the command line is that of the parent
                tempfile.tempdir = None  # cached, and $TMPDIR may differ now
                _run(command)
            finally:
                os._exit(1)
        if process_group is not None:
            with contextlib.suppress(OSError):  # the child does it, too: either may be first
                os.setpgid(self.pid, process_group)
        if self.stdout and written is not None:
            os.close(written)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return processes.wait(self, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _reset_handlers() -> None:
    for number in signal.valid_signals():
        if callable(handler := signal.getsignal(number)) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)


def _set_files(streams: Sequence[int | None], others: tuple[int, ...]) -> None:
    """Set standard input, output and error, None for no file, keep `others` open, and close all other descriptors."""
    null = os.open(os.devnull, os.O_RDWR)
    copies = [os.dup(null if stream is None else stream) for stream in streams]  # their numbers may overlap with 0 to 2
    for number, stream in enumerate(copies):
        os.dup2(stream, number)
    low = 3
    for kept in sorted(others):
        os.set_inheritable(kept, True)
        os.closerange(low, kept)
        low = kept + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
    # The parent's objects may hold a lock. `closefd` keeps an object that is collected from closing the file.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    # Line-buffered, so that a line is logged immediately and not lost in a kill.
    by_lines: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
    sys.stdout, sys.stderr = open(1, "w", **by_lines), open(2, "w", **by_lines)  # noqa: SIM115


def _run(command: list[str]) -> NoReturn:
    """Run Python's command line in this process, then exit."""
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


def _run_module(arguments: list[str]) -> None:
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _run_code(arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments[1:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(arguments[0], "<string>", "exec"), main.__dict__)  # noqa: S102  # as `python -c` does


_RUN: dict[str, Callable[[list[str]], None]] = {"-m": _run_module, "-c": _run_code}
