"""The rendezvous, a barrier before TensorFlow starts: all tasks of the cluster reach each other, or the start fails.

TensorFlow's own start waits for a missing task forever and does not name it. Here each task listens on the address that
TF_CONFIG gives to its TensorFlow server, and dials the addresses of the other tasks (`cluster/system/connection.py`).
So a name that does not resolve, a closed port and a task that never started are each reported as such, and the wait has
a timeout.

A task passes once it has reached every other task and every other task has reached it. Both are needed: a task that
closed its listener as soon as it had reached the others would look missing to a slower task.

While the hub (`hub.py`) is connected, a task dials only the chief and the next task, reports to the hub that it has
reached both, and waits until every other task has reported the same: O(N) connections. All tasks dial those that are
still absent after a while, to learn the reason and to let tasks without a hub join. Few absent tasks are dialed soon,
many only after up to half of the timeout, since this takes N^2 connections.
"""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.agent.run_view import RunView
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.logs import last_line
from cluster.contract.spec import ClusterSpec, Task
from cluster.system.connection import Client, PeerConnection, Refused, Server
from cluster.system.errors import ClusterError, TimedOut
from cluster.system.ports import open_listener
from cluster.system.processes import describe_exit

GATHER_S = 3.0
"""Shortest time from the start until all tasks dial those that are still absent."""
SMALL = 8
"""Up to this many other tasks, a task without a hub dials all of them immediately."""
HUB_S = 10.0
"""Shortest time without a message from the hub until a task of a larger gang dials all others."""
DIALS = 128
"""Number of connections that the tasks together may make at once without a delay."""
DIALERS = 8
"""Number of tasks that a task dials at a time."""
AT_ONCE = 16
"""Beyond this many tasks, each of them polls and dials less often, so that the total rate stays the same."""
PASSED_S = 0.5
"""How often to ask which tasks have passed."""
CONNECT_TIMEOUT_S = 2.0
LAST_TRY_S = 5.0
"""How long tasks that have already answered are dialed again before the rendezvous fails."""
AGAIN = "does not answer any more"
POLL_S = 0.02
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes that an HTTP/2 client sends: the preface and empty settings (RFC 9113, 3.4)."""
_HTTP2_SETTINGS = b"\4"
"""The frame type after the three length bytes in the first frame of an HTTP/2 server."""


class PortTaken(ClusterError):
    """Another program listens on the task's port."""


class Abandoned(ClusterError):
    """Waiting became pointless: for instance, the run ended or a newer generation began."""


class Incomplete(TimedOut):
    """Tasks missed the rendezvous."""

    def __init__(self, message: str, missing: Collection[str]) -> None:
        super().__init__(message)
        self.missing = frozenset(missing)


class Attendance:
    """The attendance as known to one task; its listener's and dialer's threads update it."""

    def __init__(self, token: str, others: frozenset[str], view: RunView | None = None, generation: int = 0) -> None:
        self.token, self.others, self.view, self.generation = token, others, view, generation
        self.missing = dict.fromkeys(others, "not tried yet")
        """The tasks that this task has not reached, each with the latest reason."""
        self.unconfirmed = set(others)
        """The tasks that have not reached this task."""
        self.received_s = 0.0
        """When the hub was last connected, in seconds since the rendezvous began."""
        self.last_try_ends = 0.0
        """The end of the last try, in which all are dialed once more, by the monotonic clock; 0 before it begins."""
        self.over = threading.Event()

    @property
    def absent(self) -> frozenset[str]:
        """The tasks to wait for.

        While some tasks cannot be reached, a reachable task does not count as absent, although it may not have dialed
        this task yet: it dials some only after it has reached others.
        """
        return frozenset(self.missing) or frozenset(self.unconfirmed)

    def mark_present(self, names: Collection[str]) -> None:
        """Record that these tasks need not be reached any more."""
        for name in names:
            self.missing.pop(name, None)
            self.unconfirmed.discard(name)

    def exchange(self, first: frozenset[str], waited_s: float, timeout_s: float) -> frozenset[str]:
        """Exchange the attendance with the hub; return the tasks to dial from now on, which always include `first`."""
        if self.last_try_ends:
            return self.others
        if self.view is None or not self.view.hub_is_current:
            waits = waited_s - self.received_s < self._delay_s(HUB_S, self.others, timeout_s)
            return first if len(self.others) > SMALL and waits else self.others
        self.received_s = waited_s
        silent = first & self.missing.keys()
        if not silent:
            self.view.join_rendezvous(self.generation)
        if (absent := self.view.absent(self.generation)) is not None:
            self.mark_present(self.others - absent - silent)
        if waited_s < (timeout_s / 2 if absent is None else self._delay_s(GATHER_S, absent, timeout_s)):
            return first
        return self.others if absent is None else first | absent

    def _delay_s(self, least_s: float, dialed: Collection[str], timeout_s: float) -> float:
        """Return how long to wait before all tasks dial `dialed`: many connections slow down a start that is slow."""
        return min(timeout_s / 2, least_s * max(1.0, len(self.others) * len(dialed) / DIALS))

    def gives_up(self, now: float) -> bool:
        """Return whether the rendezvous has failed; called after the timeout.

        If every task has answered before, one has stopped answering: all are dialed once more to find out which.
        """
        if not self.missing and not self.last_try_ends:
            self.last_try_ends = now + LAST_TRY_S
            self.missing = dict.fromkeys(self.others, AGAIN)
        return now >= self.last_try_ends


def hold_rendezvous(
    spec: ClusterSpec,
    task: Task,
    view: RunView | None = None,
    generation: int = 0,
    *,
    token: str,
    timeout_s: float,
    abandon: Callable[[], bool] = lambda: False,
    passed: Callable[[], Collection[str]] = tuple,
    explain: Callable[[str], str] = lambda name: "",
    report: Callable[[str], None] = lambda obstacle: None,
    patience: Callable[[Collection[str]], float] | None = None,
) -> None:
    """Return once all members of the cluster, one of which is `task`, reach each other.

    Args:
        token: the run's secret with the generation; tasks with another token, such as leftovers, do not count.
        abandon: called repeatedly; waiting ends when it returns true.
        passed: returns the tasks that need not answer any more, since they have already passed this rendezvous.
        explain: returns a description of a missing task, such as its exit code and last line.
        report: called with the reason why this task cannot listen, and with an empty string once it can.
        patience: returns the timeout in seconds for a set of absent tasks; without it, `timeout_s`.

    Raises:
        Incomplete: tasks are missing; the message gives the reason for each.
        PortTaken, TimedOut, Abandoned: see `open_task_listener`.
    """
    others = [member for member in spec.members if member.name != task.name]
    if not others:
        return
    rendezvous = Attendance(token, frozenset(other.name for other in others), view, generation)
    began = asked = time.monotonic()
    asked -= PASSED_S
    listening_s = patience(rendezvous.others) if patience else timeout_s
    listener = open_task_listener(task, timeout_s=listening_s, abandon=abandon, report=report)
    answering = _Answering(listener, task, token, rendezvous.unconfirmed)
    first = dialed_first(spec, task)
    poll_s = POLL_S * larger(len(others))
    dialer = Dialer(task, {other.name: other for other in others}, rendezvous, 5 * poll_s)
    try:
        while rendezvous.absent:
            dialer.dial(rendezvous.exchange(first, time.monotonic() - began, timeout_s))
            if (now := time.monotonic()) - asked >= PASSED_S:
                asked = now
                rendezvous.mark_present(passed())
            if abandon():
                raise Abandoned("the rendezvous was abandoned")
            absent = rendezvous.absent  # again: the last one may have answered by now
            limit_s = patience(absent) if patience else timeout_s
            if absent and (now := time.monotonic()) - began > limit_s and rendezvous.gives_up(now):
                raise Incomplete(_describe_missing(rendezvous, absent, limit_s, explain), absent)
            time.sleep(poll_s)
        if view:  # the last task may have been reached without the hub, from which others wait for a report
            view.join_rendezvous(generation)
    finally:
        rendezvous.over.set()
        dialer.threads.shutdown(wait=False, cancel_futures=True)
        answering.close()


def dialed_first(spec: ClusterSpec, task: Task) -> frozenset[str]:
    """Return the tasks that a task always dials: the chief, and the next task in the order of the cluster."""
    names = [member.name for member in spec.members]
    after = names[(names.index(task.name) + 1) % len(names)]
    return frozenset({names[0], after}) - {task.name}


def await_turn(
    task: Task, *, token: str, abandon: Callable[[], bool], report: Callable[[str], None] = lambda obstacle: None
) -> None:
    """Listen, as a left-out task, until `abandon` returns true; see `open_task_listener` for errors."""
    listener = open_task_listener(task, timeout_s=float("inf"), abandon=abandon, report=report)
    answering = _Answering(listener, task, token, set())
    try:
        while not abandon():
            time.sleep(POLL_S)
    finally:
        answering.close()


def _describe_missing(
    rendezvous: Attendance, absent: Collection[str], limit_s: float, explain: Callable[[str], str]
) -> str:
    missing = []
    for name in sorted(absent):
        reason = rendezvous.missing.get(name, "answers, but cannot reach this task")
        missing.append(f"{name} ({'; '.join(filter(None, [reason, explain(name)]))})")
    return f"the cluster was not complete after {limit_s:g} s: missing {', '.join(missing)}"


def explain_missing(run: RunFolder, task: str) -> str:
    """Describe, from its records, a task that does not answer."""
    beat = run.heartbeats().get(task)
    if beat is None:
        return "never started"
    explanation = f"state {beat.state}"
    if beat.exit_code is not None:
        explanation += f", {describe_exit(beat.exit_code)}"
    if beat.obstacle:
        explanation += f", {beat.obstacle}"
    if last := last_line(run.log(task)):
        explanation += f", last line: {last[:200]}"
    return explanation


class _Answering(Server):
    """Accepts connections at a task's address, in a thread. A client confirms by a message that it has connected."""

    def __init__(self, listener: socket.socket, task: Task, token: str, unconfirmed: set[str]) -> None:
        super().__init__(listener, _secret(token, task), len(unconfirmed))
        self._unconfirmed = unconfirmed
        self.start()

    def on_message(self, peer: PeerConnection, message: dict[str, Any]) -> None:  # noqa: ARG002
        self._unconfirmed.discard(peer.channel.task)


class Dialer:
    """Dials other tasks repeatedly until each has answered or the rendezvous is over.

    It uses a few threads: one for each task would make N^2 threads on a machine that runs all tasks.
    """

    def __init__(self, task: Task, others: dict[str, Task], rendezvous: Attendance, again_s: float) -> None:
        """Prepare to dial; a task that did not answer is dialed again after `again_s`."""
        self._task, self._others, self._rendezvous, self._again_s = task, others, rendezvous, again_s
        self._dialed: set[str] = set()
        self.threads = ThreadPoolExecutor(DIALERS, thread_name_prefix="dialer")

    def dial(self, names: frozenset[str]) -> None:
        """Dial the given tasks from now on, unless they have answered."""
        for name in sorted((names & self._rendezvous.missing.keys()) - self._dialed):
            self._dialed.add(name)
            self.threads.submit(self._dial, name)

    def _dial(self, name: str) -> None:
        rendezvous = self._rendezvous
        if name not in rendezvous.missing or rendezvous.over.is_set():  # the hub may have reported it
            self._dialed.discard(name)
            return
        if not (reason := dial(self._task, self._others[name], rendezvous.token, CONNECT_TIMEOUT_S)):
            rendezvous.missing.pop(name, None)
            self._dialed.discard(name)
            return
        rendezvous.missing[name] = reason
        rendezvous.over.wait(self._again_s)
        with contextlib.suppress(RuntimeError):  # the executor has been shut down
            self.threads.submit(self._dial, name)


def dial(task: Task, other: Task, token: str, timeout_s: float) -> str:
    """Dial another task once; return why it did not answer, or an empty string if it did."""
    try:
        with Client((other.host, other.port), _secret(token, other), task.name, timeout_s) as connection:
            connection.send({})
            return ""
    except EOFError:
        return f"{other.address} is not {other.name} of this generation of the run"
    except socket.gaierror:
        return f"the name {other.host} does not resolve"
    except ConnectionRefusedError:
        return f"nothing listens on {other.address}"
    except TimeoutError:
        return f"{other.address} does not answer"
    except (OSError, Refused) as error:
        return f"{other.address} answers with something else: {error or type(error).__name__}"


def _secret(token: str, answering: Task) -> str:
    """Return the secret that both sides prove to know; the name in it makes sure that the intended task answers."""
    return f"{token} {answering.name}"


def open_task_listener(
    task: Task, *, timeout_s: float, abandon: Callable[[], bool], report: Callable[[str], None]
) -> socket.socket:
    """Listen on a task's address. Retries while the port is in use or the address is not available.

    The kernel frees a killed program's port only after its memory, and a machine can be off its network for a while.

    Raises PortTaken or TimedOut if that lasts until the timeout, and Abandoned once `abandon` returns true.
    """
    deadline, reported = time.monotonic() + timeout_s, ""
    while True:
        try:
            # A container's task name resolves to its only interface; on one machine everything is on loopback.
            listener = open_listener(task.host, task.port)
        except OSError as error:
            obstacle = _obstacle(task, error)
            if str(obstacle) != reported:
                report(reported := str(obstacle))
            is_temporary = isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
            if time.monotonic() > deadline or not is_temporary:
                raise obstacle from error
            if abandon():
                raise Abandoned("waiting for the port was abandoned") from error
            time.sleep(POLL_S)
        else:
            if reported:
                report("")
            return listener


def _obstacle(task: Task, error: OSError) -> ClusterError:
    problem = f"{task.name} cannot listen on {task.address}: {error.strerror or error}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return TimedOut(f"{problem}; is this machine on the cluster's network?")
    port = f"ss -ltnp 'sport = :{task.port}'"
    return PortTaken(f"{problem}; end the program that holds port {task.port} ({port} shows it) and start again")


def larger(count: int) -> float:
    """Return the factor by which each of `count` tasks polls less often than one of a few."""
    return max(1.0, count / AT_ONCE)


def await_servers(tasks: Sequence[Task], *, timeout_s: float, abandon: Callable[[], bool], callers: int = 1) -> bool:
    """Wait until the TensorFlow servers of all these tasks listen; return False after the timeout or when abandoned.

    `callers` tasks wait for them at the same time.

    A gRPC client that connects a moment too early waits for a second before it retries. The probe is an HTTP/2
    handshake, to tell the server from a rendezvous listener that may still be open.
    """
    deadline = time.monotonic() + timeout_s
    left = list(tasks)
    while left and not abandon() and time.monotonic() < deadline:
        left = [task for task in left if not _speaks_http2(task)]
        if left:
            time.sleep(POLL_S * larger(callers))
    return not left


def _speaks_http2(task: Task) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((task.host, task.port), CONNECT_TIMEOUT_S) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        server.sendall(_HTTP2_HELLO)
        return server.recv(4, socket.MSG_WAITALL)[3:] == _HTTP2_SETTINGS
    return False
