"""The first process of a local run, which only makes sure that the run leaves no process behind.

The kernel makes it the parent of every descendant whose own parent has ended, including daemons that began a session
of their own and cleared their environment. When the supervisor, at first its only child, ends for whatever reason, it
kills all that is left. Only what is started after this process was killed with SIGKILL can survive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from cluster.system import process_table, processes

STOPPED_S = 8.0
"""How long the supervisor may be stopped: until it continues, it brings back no agent."""
KILL_TIMEOUT_S = 10.0
"""Longest time for what is left to end; a process in an uninterruptible call to the kernel may take longer."""


def keep(work: Callable[[], None], on_terminate: Callable[[], object]) -> None:
    """Run a function in a child process, and return when that has ended and nothing that it started is left.

    Only the child comes back from `work`, and never from here.

    Args:
        work: what the child runs.
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
    """Return the exit code of the child, which is continued if a signal stops it; reap adopted processes until then."""
    recorded = processes.identity(child)
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            if pid == child:
                timer = threading.Timer(STOPPED_S, processes.kill, (recorded, signal.SIGCONT))
                timer.daemon = True
                timer.start()
        elif pid == child:
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
