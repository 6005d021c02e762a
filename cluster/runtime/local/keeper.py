"""The first process of a local run: it does nothing but see to it that the run leaves no process behind.

The kernel gives it every descendant whose own parent has ended, also a daemon that began a session of its own and
emptied its environment. When the supervisor, its only child at first, ends, however that comes, it kills what is left.
So one process is enough to end everything; what survives is what somebody starts after killing this one with SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from cluster.system import process_table, processes

KILL_TIMEOUT_S = 10.0
"""Longest time for what is left to end; a process in an uninterruptible call to the kernel may take longer."""


def keep(work: Callable[[], None], on_terminate: Callable[[], object]) -> None:
    """Do some work in a child process and return when that has ended and nothing that it started is left.

    Only the child comes back from `work`, and never from here.

    Args:
        work: what the child does.
        on_terminate: what SIGTERM to this process does.

    Raises:
        SystemExit: the child failed.
    """
    processes.adopt_orphans()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        processes.die_with_parent()
        if os.getppid() != keeper:  # it died before the kernel could signal its death
            os._exit(128 + signal.SIGKILL)
        work()
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, lambda *_: on_terminate())
    code = _reap_until(child)
    _kill_the_rest()
    raise SystemExit(code)


def _reap_until(child: int) -> int:
    """Return the exit code of the child; until then what was adopted and ends is taken note of."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return processes.as_exit_code(os.waitstatus_to_exitcode(status))


def _kill_the_rest() -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := (table := process_table.ProcessTable()).descendants(os.getpid()):
        for pid in left:
            table.kill(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
