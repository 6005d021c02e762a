"""The run as one agent sees it: the folder, and the messages of the other agents through the chief's hub."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cluster.agent.connection import READ_BYTES, Client, Refused
from cluster.agent.hub import REPLACED, SILENCE_S, Hub, News
from cluster.contract.run import joining
from cluster.contract.run.copies import Copy
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import Invitation
from cluster.contract.run.records import AfterStop, Generation, Heartbeat, Outcome
from cluster.contract.spec import ClusterSpec, Role, Task

T = TypeVar("T")

READ_S = 2.0
"""How often an agent reads the folder for changes that the hub would report."""
LOOK_S = 0.5
"""How often the task's own heartbeat is read; a new one is sent at once."""
PULSE_S = 1.0
"""How often a message is sent even without a change."""
RETRY_S = 0.5
LONGEST_RETRY_S = 5.0
CONNECT_S = 3.0


class Link:
    """A task's end of its connection. Only its thread waits."""

    def __init__(self, run: RunFolder, task: str, copy: Copy | None = None) -> None:
        """Begin to connect, for this copy of the task if there may be several."""
        self._run, self._task, self._copy = RunFolder(run.path), task, copy
        self.news = News()
        """The last digest of the hub."""
        self._received_at = float("-inf")
        self._message: dict[str, Any] = {"number": -1}
        """The newest message, without the heartbeat."""
        self._stopped = False
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._keep, name="link", daemon=True)
        self._thread.start()

    @property
    def fresh(self) -> bool:
        """Whether the hub has sent a message recently."""
        return time.monotonic() - self._received_at < SILENCE_S

    def report(self, number: int, begun: Generation | None, outcome: Outcome | None) -> None:
        """Send a generation and the outcome to the hub."""
        before, ended = self._message, outcome and outcome.to_json()
        if (before["number"], before.get("outcome")) != (number, ended):
            here = number == before["number"] and before.get("here", False)
            self._replace_message(
                {"number": number, "begun": begun and begun.to_json(), "outcome": ended, "here": here}
            )

    def join_rendezvous(self, number: int) -> None:
        """Report that this task is at the rendezvous of a generation, and that the connections that it needs work."""
        if number == self._message["number"] and not self._message.get("here"):
            self._replace_message(self._message | {"here": True})

    def close(self) -> None:
        """Close the connection for good."""
        self._stopped = True
        self._wake()
        self._thread.join(CONNECT_S + 1)

    def _replace_message(self, message: dict[str, Any]) -> None:
        self._message = message
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough
            self._waker.send(b"\0")

    def _keep(self) -> None:
        pause_s = RETRY_S
        while not self._stopped:
            began = time.monotonic()
            with contextlib.suppress(OSError, EOFError, Refused, ValueError):
                if self._copy and self._copy.is_superseded:
                    return  # its connection would take the place of the newer copy's
                if found := joining.invitation(self._run):
                    self._hold(found)
            self._received_at = float("-inf")
            lasted = time.monotonic() - began > SILENCE_S
            pause_s = RETRY_S if lasted else min(LONGEST_RETRY_S, pause_s * 1.5)
            deadline = time.monotonic() + pause_s
            while not self._stopped and (left_s := deadline - time.monotonic()) > 0:
                self._await(left_s)

    def _await(self, seconds: float, *clients: Client) -> bool:
        """Wait until one of these can be read, or a message is to be sent."""
        poll = select.poll()
        for each in [self._woken.fileno(), *(client.fileno() for client in clients)]:
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(READ_BYTES)
        return any(each.fileno() in ready for each in clients)

    def _hold(self, hub: Invitation) -> None:
        """Exchange messages with the hub until the connection breaks."""
        with Client((hub.host, hub.port), joining.token(self._run), self._task, CONNECT_S) as connection:
            received_at = looked = sent_at = time.monotonic()
            looked -= LOOK_S
            sent: dict[str, Any] = {}
            beat: Heartbeat | None = None
            digests = connection.first
            while not self._stopped:
                now = time.monotonic()
                for digest in digests:
                    self._receive(digest)
                    received_at = now
                if now - received_at > SILENCE_S:
                    raise TimeoutError
                if self._message["number"] >= 0:
                    if now - looked >= LOOK_S:
                        looked, beat = now, self._run.heartbeat(self._task)
                    message = self._message | {"beat": beat and beat.to_json()}
                    if message != sent or now - sent_at >= PULSE_S:
                        connection.send(message)  # or fail after the timeout: the hub takes nothing
                        sent, sent_at = message, now
                digests = connection.receive() if self._await(LOOK_S, connection) else []

    def _receive(self, digest: dict[str, Any]) -> None:
        """Process a message of the hub."""
        if digest == REPLACED:
            self._stopped = True  # a newer copy of this task has connected: this one uses the folder alone
        else:
            self.news, self._received_at = News.of(digest), time.monotonic()


class Board:
    """The run folder, of which less is read while the hub is connected.

    Every write goes to the folder, which decides who was first. A generation or outcome that the hub reports came from
    a record there and counts at once, since these never change; a folder on another machine may show it late.
    """

    def __init__(self, folder: RunFolder, copy: Copy | None = None) -> None:
        self.folder = folder
        """The run. It learns generations from the hub before it shows them."""
        self._copy = copy
        """The copy of the task that this agent is of."""
        self._hub: Hub | None = None
        """In the chief's agent."""
        self._link: Link | None = None
        """In any other agent."""
        self._read: dict[str, tuple[float, Any]] = {}
        self._ended: Outcome | None = None
        self._newest = -1
        """The newest generation that this agent has seen."""

    def connect(self, spec: ClusterSpec, task: Task, host: str) -> None:
        """Connect the agent of this task, which listens at `host`, with those of all other requested tasks.

        Without connections they use the folder alone.
        """
        if len(spec.tasks) == 1:
            return
        with contextlib.suppress(OSError):
            if task.role == Role.CHIEF:
                self._hub = Hub(self.folder, spec, host)
            else:
                self._link = Link(self.folder, task.name, self._copy)

    def disconnect(self) -> None:
        """Close this agent's connections. Everything is read from the folder again."""
        side = self._side
        self._hub = self._link = None
        if side:
            side.close()

    @property
    def _side(self) -> Hub | Link | None:
        return self._hub or self._link

    # Reads that are less frequent with a connection

    @property
    def is_relieved(self) -> bool:
        """Whether the chief's agent watches the others for this one, and reports changes to it."""
        return self._link is not None and self.hub_is_current

    def _at_times(self, what: str, read: Callable[[], T]) -> T:
        """Read the folder, or return the value of at most `READ_S` ago if the hub would have reported a change."""
        at, value = self._read.get(what, (float("-inf"), None))
        now = time.monotonic()
        if not self.is_relieved or now - at >= READ_S:
            value = read()
            self._read[what] = (now, value)
        latest: T = value
        return latest

    @property
    def hub_is_current(self) -> bool:
        """Whether the hub is connected, and knows the newest generation that this agent knows."""
        return (side := self._side) is not None and side.fresh and side.news.number >= self._newest

    def _news(self) -> News:
        """Return the hub's last news; empty if it is not connected, or knows only an earlier generation."""
        return side.news if (side := self._side) and self.hub_is_current else News()

    @property
    def generation(self) -> int:
        """The current generation, counted from 0."""
        if begun := self._news().begun:
            self.folder.learn(begun)
            self._newest = max(self._newest, begun.generation)
        self._newest = max(self._newest, self._at_times("generation", lambda: self.folder.generation))
        if self._link:
            self._link.report(self._newest, self.folder.begun(self._newest), self._ended)
        return self._newest

    def begun(self, number: int) -> Generation | None:
        """Return the record of a generation; None without one. It is found before the folder lists it."""
        if record := self.folder.begun(number):
            self._newest = max(self._newest, number)
        return record

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it continues. It stays so for as long as this agent lives."""
        if self._ended is None:
            self._ended = self._news().outcome or self._at_times("outcome", lambda: self.folder.outcome)
        return self._ended

    def is_over(self, generation: int) -> bool:
        """Whether a generation's programs serve no purpose any more."""
        return self.outcome is not None or self.generation > generation

    @property
    def stop_requested(self) -> bool:
        """Whether the tasks are to save and stop."""
        return (self._news().stop or self._at_times("stop", lambda: self.folder.stop_request)) is not None

    # Writes go to the folder at once, and this agent then reads it. An older copy of a task writes nothing

    def require_newest(self) -> None:
        """Return unless a newer copy of the task has begun.

        Raises:
            Superseded: one has.
        """
        if self._copy:
            self._copy.require_newest()

    def begin_generation(self, number: int, **why: Any) -> bool:
        """Begin generation `number` unless another task has, or the run has ended; return whether this call did."""
        self.require_newest()
        try:
            return self.folder.outcome is None and self.folder.begin_generation(number, **why)
        finally:
            self._read.clear()

    def end(self, state: str, **why: Any) -> bool:
        """Record the outcome unless another task has; return whether this call did."""
        self.require_newest()
        try:
            return self.folder.end(state, **why)
        finally:
            self._read.clear()

    def request_stop(self, by: str, *, then: str = AfterStop.END) -> bool:
        """Request that every task saves at the same step and stops; return False if that was requested before."""
        self.require_newest()
        try:
            return self.folder.request_stop(by, then=then)
        finally:
            self._read.clear()

    # The other tasks

    def heartbeat(self, task: str) -> Heartbeat | None:
        """Return a task's newest heartbeat; None without a valid one."""
        return (self._hub.beat(task) if self._hub else None) or self.folder.heartbeat(task)

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the newest heartbeat of every task."""
        beats = self.folder.heartbeats()
        return {name: self._hub.beat(name) or beat for name, beat in beats.items()} if self._hub else beats

    @property
    def newest_step(self) -> int:
        """The newest step that any task reports."""
        return max((beat.step for beat in self.heartbeats().values()), default=0)

    @property
    def unlinked(self) -> frozenset[str] | None:
        """The tasks without a connection to the hub, so that their heartbeats in the folder count; None for all."""
        return self._news().unlinked if self.is_relieved else None

    def is_connected(self, task: str) -> bool:
        """Return whether a task is connected to the hub, as far as this agent knows."""
        unlinked = self._news().unlinked
        return unlinked is not None and task not in unlinked

    # The rendezvous

    def join_rendezvous(self, number: int) -> None:
        """Report that this task is at the rendezvous of a generation, and that the connections that it needs work."""
        if side := self._side:
            side.join_rendezvous(number)

    def absent(self, number: int) -> frozenset[str] | None:
        """Return the tasks that are not at the rendezvous of a generation yet; None if unknown, or for many."""
        news = self._news()
        return news.absent if news.number == number else None
