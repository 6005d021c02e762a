"""The hub and its clients: the chief's agent accepts a connection from each other agent and sends a digest to all.

One thread serves all connections. It sends a digest every `PULSE_S`, within `TICK_S` after a change for which other
agents wait, and immediately when a generation begins; a digest wakes the agents. This takes O(N) messages a second for
N tasks, even while they join the rendezvous one by one.
"""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Self

from cluster.contract.run import joining, membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import Invitation, TaskCopy
from cluster.contract.run.records import Generation, Heartbeat, Outcome, StopRequest
from cluster.contract.schema import Count, Record
from cluster.contract.spec import ClusterSpec
from cluster.system.connection import TICK_S, Client, PeerConnection, Refused, Server
from cluster.system.waiting import Bell

PULSE_S = 1.0
SILENCE_S = 3.0
"""Either side falls back to the folder after this long without a message; one is due every second."""
BEAT_S = 1.5
"""After this long without a message from a task, the folder may have a newer heartbeat of it."""
LOOK_S = 0.5
"""How often a client reads its task's heartbeat; it sends a new one immediately."""
RETRY_S = 0.5
LONGEST_RETRY_S = 5.0
CONNECT_S = 3.0
FEW = 32
"""A digest names at most this many tasks; a larger set is `MANY`."""
MANY = None
REPLACED = {"replaced": True}
"""The message to an agent whose task has connected a second time."""


class Message(Record):
    """An agent's message: the newest generation that it knows with its record, the outcome, its task's heartbeat."""

    number: Count
    begun: Generation | None = None
    outcome: Outcome | None = None
    beat: Heartbeat | None = None
    here: bool = False
    """Whether its task is at the rendezvous: it listens, and has reached the tasks that it must reach itself."""


class News(Record):
    """The digest that the hub sends to every agent: the current generation with its record, the outcome, and more."""

    number: Count = -1
    begun: Generation | None = None
    outcome: Outcome | None = None
    stop: StopRequest | None = None
    unlinked: frozenset[str] | None = MANY
    """The tasks without a connection to the hub; None for many."""
    absent: frozenset[str] | None = MANY
    """The members of the cluster that have not joined the rendezvous yet; None for many."""

    @classmethod
    def from_digest(cls, digest: Any) -> Self:
        """Return the news in a digest; raise ValueError if it is not valid."""
        news = cls.from_json(digest)
        if news.begun:
            news.begun.require_number(news.number)
        return news


class Roster:
    """The hub's records of a run's tasks. Times are from its monotonic clock."""

    def __init__(self, run: RunFolder, names: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any connection. No other thread may use `run`; the first of the names is the chief."""
        self._run, self._clock = run, clock
        self._chief, *self._others = names
        self._members: frozenset[str] = frozenset()
        self._number = -1
        self._outcome: Outcome | None = None
        self._received_at: dict[str, float] = {}
        """The time of each connected task's last message."""
        self._beats: dict[str, Heartbeat] = {}
        self._here: set[str] = set()
        """The tasks at the rendezvous of the current generation."""

    def receive(self, name: str, received: Any) -> bool:
        """Process a message of an agent unless its generation is over; return whether a new generation has begun.

        Raises ValueError if it is invalid.
        """
        message = Message.from_json(received)
        if begins := message.begun is not None and message.number > self._number:
            self._run.learn(message.begun.require_number(message.number))
            self._look_at_generation()
        self._received_at[name] = self._clock()
        if message.number != self._number:
            return begins
        self._outcome = self._outcome or message.outcome
        if message.here:
            self._here.add(name)
        beat = message.beat
        if beat and (beat.task, beat.generation) == (name, self._number):
            self._beats[name] = beat
        return begins

    def closed(self, name: str) -> None:
        self._received_at.pop(name, None)
        self._beats.pop(name, None)

    def join_rendezvous(self, number: int) -> None:
        """Record that the chief is at the rendezvous of a generation."""
        if number == self._number:
            self._here.add(self._chief)

    def beat(self, name: str) -> Heartbeat | None:
        """Return the newest heartbeat that a task has sent; None without a recent message, as the folder's is newer."""
        age_s = self._clock() - self._received_at.get(name, float("-inf"))
        return self._beats.get(name) if age_s < BEAT_S else None

    def _look_at_generation(self) -> None:
        if (number := self._run.generation) != self._number:
            self._number, self._here, self._beats = number, set(), {}
            self._members = frozenset(task.name for task in membership.cluster(self._run, number).members)

    def digest(self) -> dict[str, Any]:
        """Return the digest for the other agents, from the folder and their messages."""
        self._look_at_generation()
        self._outcome = self._outcome or self._run.outcome
        now = self._clock()
        linked = {name for name, at in self._received_at.items() if now - at < SILENCE_S}
        return News(
            number=self._number,
            begun=self._run.generation_record(self._number),
            outcome=self._outcome,
            stop=self._run.stop_request,
            unlinked=_few(set(self._others) - linked),
            absent=_few(self._members - self._here),
        ).to_json()


def urgent(digest: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a digest that agents wait for; only whether any task is absent, and nothing of `unlinked`."""
    return digest | {"unlinked": [], "absent": digest.get("absent") == []}


def _few(names: Collection[str]) -> frozenset[str] | None:
    return frozenset(names) if len(names) <= FEW else MANY


class Hub(Server):
    """The server side, in the chief's agent."""

    def __init__(self, run: RunFolder, spec: ClusterSpec, host: str) -> None:
        """Listen on `host`, and record the address in the run folder."""
        self._names = [task.name for task in spec.tasks]
        super().__init__(*joining.open_hub_listener(run, spec.tasks[0], host), len(spec.tasks))
        self._roster = Roster(RunFolder(run.path), self._names)
        self._lock = threading.Lock()
        """Guards the roster."""
        self._sent: dict[str, Any] = {}
        self._sent_at = self._looked_at = 0.0
        self.news, self.bell = News(), Bell()
        self.start()

    @property
    def fresh(self) -> bool:
        """Whether the thread has sent a digest recently."""
        return time.monotonic() - self._sent_at < SILENCE_S

    def beat(self, task: str) -> Heartbeat | None:
        with self._lock:
            return self._roster.beat(task)

    def join_rendezvous(self, number: int) -> None:
        with self._lock:
            self._roster.join_rendezvous(number)

    def on_open(self, peer: PeerConnection) -> None:
        """Accept the connection of a known task, and close an older connection of the same task."""
        task = peer.channel.task
        if task not in self._names[1:]:
            raise Refused(f"no task {task!r}")
        for other in [each for each in self._peers.values() if each.channel.established and each is not peer]:
            if other.channel.task == task:
                other.channel.send(REPLACED)
                self._flush(other)
                self._close(other)
        if self._sent:
            peer.channel.send(self._sent)

    def on_message(self, peer: PeerConnection, message: dict[str, Any]) -> None:
        with self._lock:
            if self._roster.receive(peer.channel.task, message):
                self._looked_at = float("-inf")

    def on_close(self, peer: PeerConnection) -> None:
        """Record that a task is disconnected, unless it has a newer connection."""
        task, others = peer.channel.task, [each.channel for each in self._peers.values()]
        if peer.channel.established and not any(each.established and each.task == task for each in others):
            with self._lock:
                self._roster.closed(task)

    def on_tick(self) -> None:
        """Send the digest to every task if it is due."""
        now = time.monotonic()
        if now - self._looked_at < TICK_S and not self._stopped:
            return
        self._looked_at = now
        with self._lock:
            try:
                digest = self._roster.digest()
            except (OSError, ValueError):  # a full disk, or a cluster.json that was damaged
                return
        if urgent(digest) != urgent(self._sent) or now - self._sent_at >= PULSE_S:
            self._sent, self._sent_at, self.news = digest, now, News.from_digest(digest)
            for peer in [each for each in self._peers.values() if each.channel.established]:
                peer.channel.send(digest)
                self._flush(peer)
            self.bell.ring()


class Outgoing:
    """The newest message of a task to the hub, without its heartbeat. Each change rings `woken`."""

    def __init__(self) -> None:
        self.message, self.woken = Message(number=-1), Bell()

    def report(self, number: int, begun: Generation | None, outcome: Outcome | None) -> None:
        """Set the message's generation and outcome."""
        before = self.message
        if (before.number, before.outcome) != (number, outcome):
            here = before.here and before.number == number
            self.message = Message(number=number, begun=begun, outcome=outcome, here=here)
            self.woken.ring()

    def join_rendezvous(self, number: int) -> None:
        """Mark the task in the message as being at the rendezvous."""
        if number == self.message.number and not self.message.here:
            self.message = replace(self.message, here=True)
            self.woken.ring()


class HubClient(Outgoing):
    """The client side, in the agent of any other task. Only its thread blocks."""

    def __init__(self, run: RunFolder, task: str, copy: TaskCopy | None = None) -> None:
        """Begin to connect; `copy` identifies this copy of the task if a scheduler may start several."""
        super().__init__()
        self._run, self._task, self._copy = RunFolder(run.path), task, copy
        self.news = News()
        self._received_at = float("-inf")
        self._stopped = False
        self.bell = Bell()
        self._thread = threading.Thread(target=self._stay_connected, name="hub client", daemon=True)
        self._thread.start()

    @property
    def fresh(self) -> bool:
        """Whether the hub has sent a message recently."""
        return time.monotonic() - self._received_at < SILENCE_S

    def close(self) -> None:
        self._stopped = True
        self.woken.ring()
        self._thread.join(CONNECT_S + 1)

    def _stay_connected(self) -> None:
        pause_s = RETRY_S
        while not self._stopped:
            began = time.monotonic()
            with contextlib.suppress(OSError, EOFError, Refused, ValueError):
                if self._copy and self._copy.is_superseded:
                    return  # a connection would replace the newer copy's
                if found := joining.read_invitation(self._run):
                    self._exchange_messages(found)
            self._received_at = float("-inf")
            pause_s = RETRY_S if time.monotonic() - began > SILENCE_S else min(LONGEST_RETRY_S, pause_s * 1.5)
            deadline = time.monotonic() + pause_s
            while not self._stopped and (left_s := deadline - time.monotonic()) > 0:
                self._await(left_s)

    def _await(self, seconds: float, *clients: Client) -> bool:
        poll = select.poll()
        for each in [self.woken.fileno(), *(client.fileno() for client in clients)]:
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        self.woken.silence()
        return any(each.fileno() in ready for each in clients)

    def _exchange_messages(self, hub: Invitation) -> None:
        with Client((hub.host, hub.port), joining.run_token(self._run), self._task, CONNECT_S) as connection:
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
                if self.message.number >= 0:
                    if now - looked >= LOOK_S:
                        looked, beat = now, self._run.heartbeat(self._task)
                    message = replace(self.message, beat=beat).to_json()
                    if message != sent or now - sent_at >= PULSE_S:
                        connection.send(message)  # times out if the hub does not read
                        sent, sent_at = message, now
                digests = connection.receive() if self._await(LOOK_S, connection) else []

    def _receive(self, digest: dict[str, Any]) -> None:
        if digest == REPLACED:
            self._stopped = True  # a newer copy of this task has connected: this copy uses only the folder
        else:
            self.news, self._received_at = News.from_digest(digest), time.monotonic()
            self.bell.ring()
