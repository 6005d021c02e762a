"""The rendezvous: every task of the cluster answers every other before TensorFlow starts, or the start fails.

TensorFlow's own start waits for a missing task forever and does not name it. Here each task listens on the address that
TF_CONFIG gives to its TensorFlow server, and greets every other task on theirs. So a name that does not resolve, a
closed port and a task that never started are each reported as such, and the wait is bounded.

A task passes once every other task has answered it and confirmed its answer. Both are needed: a task that closed its
listener as soon as its own greetings were answered would look missing to a slower task.

While the hub (cluster/agent/gang) answers, a task greets only the chief and the next task, reports to the hub that
these have answered, and waits until every other task has done so: O(N) connections. Those who have not after a while
are greeted by all, so that each is named with the reason, and tasks without a hub join: a few soon, many
only after half of the time, since that takes N^2 connections.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from cluster.agent.gang.server import READ_BYTES, Peer, Server
from cluster.agent.gang.wire import Channel, Refused
from cluster.agent.ports import CONNECT_TIMEOUT_S, POLL_S, Abandoned, listen
from cluster.contract.spec import ClusterSpec, Task
from cluster.system.errors import TimedOut

GATHER_S = 3.0
"""How long after the start those who are still absent are greeted, if they are few."""
SMALL = 8
"""Up to this many other tasks are greeted at once, with or without a connection to the hub."""
HUB_S = 10.0
"""Seconds without a message of the hub before all of a larger gang are greeted."""
GREETERS = 8
"""How many tasks one greets at a time."""
AT_ONCE = 16
"""In a larger gang each looks and greets less often, so that all together do so as often."""
ANSWER_S = 0.1
"""How soon the listener ends once the rendezvous is over."""
PASSED_S = 0.5
"""How often to ask who has passed."""


class Incomplete(TimedOut):
    """Tasks missed the rendezvous."""

    def __init__(self, message: str, missing: Collection[str]) -> None:
        super().__init__(message)
        self.missing = frozenset(missing)


@dataclass(frozen=True)
class Hub:
    """The hub's part in a rendezvous.

    Attributes:
        gathers: returns whether the hub is connected.
        come: reports to the hub that this task listens, and that the tasks that it greets first have answered.
        absent: returns the tasks that have not reported yet; None if the hub does not know, or for many.
    """

    gathers: Callable[[], bool] = lambda: False
    come: Callable[[], None] = lambda: None
    absent: Callable[[], frozenset[str] | None] = lambda: None


@dataclass
class Attendance:
    """The attendance as one task knows it; its listener and greeter threads write it."""

    token: str
    missing: dict[str, str]
    """The tasks that have not answered, each with the latest reason."""
    unconfirmed: set[str]
    """The tasks that have not confirmed our answer."""
    others: frozenset[str]
    heard_s: float = 0.0
    """The time of the hub's last message, in seconds from the beginning."""
    over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, token: str, others: Collection[str]) -> Attendance:
        """Return the attendance at the beginning."""
        return cls(token, dict.fromkeys(others, "not tried yet"), set(others), frozenset(others))

    @property
    def absent(self) -> frozenset[str]:
        """The tasks to wait for.

        While some do not answer, a task that answers is not absent: it may not greet others before it has met those.
        """
        return frozenset(self.missing) or frozenset(self.unconfirmed)

    def met(self, names: Collection[str]) -> None:
        """Note that these need not be met any more."""
        for name in names:
            self.missing.pop(name, None)
            self.unconfirmed.discard(name)

    def gather(self, hub: Hub, first: frozenset[str], waited_s: float, timeout_s: float) -> frozenset[str]:
        """Exchange the attendance with the hub; return the tasks to greet from now on.

        Args:
            hub: the hub.
            first: the tasks to greet first.
            waited_s: seconds since the beginning.
            timeout_s: seconds to wait in all.
        """
        if not hub.gathers():
            soon = len(self.others) > SMALL and waited_s - self.heard_s < min(timeout_s / 4, HUB_S)
            return first if soon else self.others
        self.heard_s = waited_s
        silent = first & self.missing.keys()
        if not silent:
            hub.come()
        if (absent := hub.absent()) is not None:
            self.met(self.others - absent - silent)
        if waited_s < (timeout_s / 2 if absent is None else min(timeout_s / 4, GATHER_S)):
            return first
        return self.others if absent is None else first | absent


def wait(
    spec: ClusterSpec,
    task: Task,
    hub: Hub | None = None,
    *,
    token: str,
    timeout_s: float,
    abandon: Callable[[], bool] = lambda: False,
    passed: Callable[[], Collection[str]] = tuple,
    explain: Callable[[str], str] = lambda name: "",
    report: Callable[[str], None] = lambda obstacle: None,
    patience: Callable[[Collection[str]], float] | None = None,
) -> None:
    """Return once all members of the cluster answer each other.

    Args:
        spec: the cluster.
        task: the member that calls.
        hub: the hub; None without one.
        token: the run's secret with the generation; tasks with another one, such as leftovers, do not count.
        timeout_s: seconds to wait for the others.
        abandon: called repeatedly; waiting ends when it returns true.
        passed: returns the tasks that need not answer any more, since they have met an earlier attempt of this one.
        explain: returns a description of a missing task, such as its exit code and last line.
        report: called with the reason why this task cannot listen, and with an empty string once it can.
        patience: returns how many seconds to wait for these tasks; without it, `timeout_s`.

    Raises:
        PortTaken: another program used this task's port all the time.
        Abandoned: `abandon` returned true.
        Incomplete: a task is missing; the message names each and the reason.
        TimedOut: this task's own address was not available.
    """
    others = [member for member in spec.members if member.name != task.name]
    if not others:
        return
    rendezvous = Attendance.of(token, [other.name for other in others])
    began = asked = time.monotonic()
    asked -= PASSED_S
    listener = listen(task, timeout_s=timeout_s, abandon=abandon, report=report)
    answering = _Answering(listener, task, token, rendezvous.unconfirmed)
    first = greeted_first(spec, task)
    hub = hub or Hub()
    poll_s = POLL_S * max(1.0, len(others) / AT_ONCE)
    greeters = Greeters(task, {other.name: other for other in others}, rendezvous, 5 * poll_s)
    try:
        while rendezvous.absent:
            greeters.greet(rendezvous.gather(hub, first, time.monotonic() - began, timeout_s))
            if (now := time.monotonic()) - asked >= PASSED_S:
                asked = now
                rendezvous.met(passed())
            if abandon():
                raise Abandoned("the rendezvous was abandoned")
            absent = rendezvous.absent  # the last of them may have answered meanwhile
            limit_s = patience(absent) if patience else timeout_s
            if absent and time.monotonic() - began > limit_s:
                raise Incomplete(_describe_missing(rendezvous, absent, limit_s, explain), absent)
            time.sleep(poll_s)
        hub.come()  # the last may have been met by greetings, and others still wait to hear of this task from the hub
    finally:
        rendezvous.over.set()
        greeters.end()
        answering.end()


def greeted_first(spec: ClusterSpec, task: Task) -> frozenset[str]:
    """Return whom a task greets even where the hub is heard: the chief, and the task after it in the cluster."""
    names = [member.name for member in spec.members]
    after = names[(names.index(task.name) + 1) % len(names)]
    return frozenset({names[0], after}) - {task.name}


def await_turn(
    task: Task, *, token: str, abandon: Callable[[], bool], report: Callable[[str], None] = lambda obstacle: None
) -> None:
    """Answer greetings as a task that was left out, until `abandon` returns true.

    Args:
        task: the one that calls.
        token: the run's secret with the generation.
        abandon: called repeatedly.
        report: called with the reason why this task cannot listen, and with an empty string once it can.

    Raises:
        PortTaken: another program uses this task's port.
        Abandoned: before this task could listen.
    """
    listener = listen(task, timeout_s=float("inf"), abandon=abandon, report=report)
    answering = _Answering(listener, task, token, set())
    try:
        while not abandon():
            time.sleep(POLL_S)
    finally:
        answering.end()


def reaches(task: Task, other: Task, token: str, timeout_s: float) -> bool:
    """Return whether a task that was left out answers."""
    return not _greeting(task, other, token, timeout_s)


def _describe_missing(
    rendezvous: Attendance, absent: Collection[str], limit_s: float, explain: Callable[[str], str]
) -> str:
    missing = []
    for name in sorted(absent):
        reason = rendezvous.missing.get(name, "answers, but cannot reach this task")
        missing.append(f"{name} ({'; '.join(filter(None, [reason, explain(name)]))})")
    return f"the cluster was not complete after {limit_s:g} s: missing {', '.join(missing)}"


class _Answering(Server):
    """Answers greetings at a task's address, in a thread. A greeting is a handshake and a message that confirms it."""

    def __init__(self, listener: socket.socket, task: Task, token: str, unconfirmed: set[str]) -> None:
        super().__init__(listener, _secret(token, task), len(unconfirmed))
        self._unconfirmed, self._over = unconfirmed, False
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def on_message(self, peer: Peer, message: dict[str, Any]) -> None:  # noqa: ARG002
        self._unconfirmed.discard(peer.channel.task)

    def end(self) -> None:
        self._over = True
        self._thread.join(CONNECT_TIMEOUT_S + 1)

    def _run(self) -> None:
        while not self._over:
            self.serve(ANSWER_S)
        self.shut_down()


class Greeters:
    """Greets other tasks, again and again until each has answered or the rendezvous is over.

    A few threads take turns with them: one for each would be N^2 on a machine that runs all tasks.
    """

    def __init__(self, task: Task, others: dict[str, Task], rendezvous: Attendance, again_s: float) -> None:
        """Prepare to greet.

        Args:
            task: the one that greets.
            others: by name.
            rendezvous: their attendance.
            again_s: seconds until a task that did not answer is greeted again.
        """
        self._task, self._others, self._rendezvous, self._again_s = task, others, rendezvous, again_s
        self._due: dict[str, None] = {}
        """The tasks to greet, the longest waiting first, without those that are being greeted."""
        self._known: set[str] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def greet(self, names: Collection[str]) -> None:
        """Greet these tasks, too, from now on."""
        if not (new := [name for name in names if name not in self._known]):
            return
        self._known.update(new)
        with self._changed:
            self._due |= dict.fromkeys(new)
            self._changed.notify_all()
        for _ in range(min(len(self._known), GREETERS) - len(self._threads)):
            self._threads.append(threading.Thread(target=self._run, daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """End the threads, once the rendezvous is over."""
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(CONNECT_TIMEOUT_S + 1)

    def _run(self) -> None:
        rendezvous = self._rendezvous
        while name := self._next():
            if reason := _greeting(self._task, self._others[name], rendezvous.token, CONNECT_TIMEOUT_S):
                rendezvous.missing[name] = reason
                rendezvous.over.wait(self._again_s)
                with self._changed:
                    self._due[name] = None
                    self._changed.notify()
            else:
                rendezvous.missing.pop(name, None)

    def _next(self) -> str:
        """Wait for a task to greet, and return its name; empty once the rendezvous is over."""
        with self._changed:
            while not self._rendezvous.over.is_set():
                for name in list(self._due):
                    del self._due[name]
                    if name in self._rendezvous.missing:  # a task that was met otherwise need not be greeted
                        return name
                self._changed.wait()
        return ""


def _greeting(task: Task, other: Task, token: str, timeout_s: float) -> str:
    """Greet another task once; return the reason why it did not answer, empty if it did."""
    deadline = time.monotonic() + timeout_s
    channel = Channel(_secret(token, other), task.name)
    try:
        with socket.create_connection((other.host, other.port), timeout_s) as connection:
            while not channel.established:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                if not (data := connection.recv(READ_BYTES)):
                    return f"{other.address} is not {other.name} of this generation of the run"
                channel.receive(data)
                connection.sendall(channel.unsent)
                channel.unsent.clear()
            channel.send({})
            connection.sendall(channel.unsent)
            return ""
    except socket.gaierror:
        return f"the name {other.host} does not resolve"
    except ConnectionRefusedError:
        return f"nothing listens on {other.address}"
    except TimeoutError:
        return f"{other.address} does not answer"
    except (OSError, Refused) as error:
        return f"{other.address} answers with something else: {error or type(error).__name__}"


def _secret(token: str, answering: Task) -> str:
    """Return the secret of a greeting, which both sides prove to know; no other answer counts as this task's."""
    return f"{token} {answering.name}"
