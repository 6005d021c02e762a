"""The hub: in the chief's agent, accepts one connection from each other agent, gathers what they say and tells all.

One thread serves all connections. It sends a digest every `PULSE_S`, and within `TICK_S` when something changed for
which others wait: O(N) messages a second for N tasks, also while these come to the rendezvous one by one.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import Any

from cluster.gang import joining
from cluster.gang.roster import HEARD_S, REPLACED, News, Roster, urgent
from cluster.gang.wire import Channel, Refused
from cluster.run.folder import RunFolder
from cluster.spec import ClusterSpec

TICK_S = 0.1
PULSE_S = 1.0
HANDSHAKE_S = 5.0
"""Longest time from a connection to the proof."""
MAX_UNPROVED = 64
"""How many connections may be without a proof at a time, besides one for each task."""
MAX_UNSENT = 2**20
"""A connection whose other side takes nothing is closed once so many bytes wait."""
READ_BYTES = 2**16


class _Peer:
    """A connection."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self.channel = connection, Channel(token)
        self.since = time.monotonic()


class Hub:
    """The chief's end of the connections."""

    def __init__(self, run: RunFolder, spec: ClusterSpec, host: str) -> None:
        """Listen, and record where.

        Args:
            run: the run.
            spec: every requested task, the chief first.
            host: the address to bind.

        Raises:
            OSError: no port can be had, or the record cannot be written.
        """
        self._names = [task.name for task in spec.tasks]
        self._listener, self._token = joining.invite(run, spec.tasks[0], host)
        self._roster = Roster(RunFolder(run.path), self._names)
        self._lock = threading.Lock()
        """Guards the roster."""
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._told: dict[str, Any] = {}
        self._told_at = 0.0
        self._stopped = False
        self.news = News()
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    @property
    def fresh(self) -> bool:
        """Whether the thread goes on."""
        return time.monotonic() - self._told_at < HEARD_S

    def beat(self, task: str) -> dict[str, Any] | None:
        """Return a connected task's newest heartbeat; None if the folder knows better."""
        with self._lock:
            return self._roster.beat(task)

    def come(self, number: int) -> None:
        """Say that the chief is at the rendezvous of a generation, and others reach it."""
        with self._lock:
            self._roster.come(number)

    def close(self) -> None:
        """Tell all once more, and close every connection."""
        self._stopped = True
        self._thread.join(HANDSHAKE_S)

    def _serve(self) -> None:
        looked = 0.0
        with self._selector:
            while not self._stopped:
                for key, events in self._selector.select(TICK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif peer := self._peers.get(key.fileobj):  # type: ignore[call-overload]
                        self._exchange(peer, events)
                if time.monotonic() - looked >= TICK_S:
                    looked = time.monotonic()
                    self._tell_all()
            self._tell_all()
            for peer in list(self._peers.values()):
                self._close(peer)
            self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            unproved = [peer for peer in self._peers.values() if not peer.channel.established]
            if len(unproved) >= MAX_UNPROVED + len(self._names):
                self._close(min(unproved, key=lambda peer: peer.since))
            connection.setblocking(False)
            peer = self._peers[connection] = _Peer(connection, self._token)
            self._selector.register(connection, selectors.EVENT_READ)
            self._flush(peer)

    def _exchange(self, peer: _Peer, events: int) -> None:
        """Receive what there is, and send what waits."""
        try:
            if events & selectors.EVENT_READ:
                if not (data := peer.connection.recv(READ_BYTES)):
                    raise ConnectionResetError
                proved = peer.channel.established
                messages = peer.channel.receive(data)
                if peer.channel.established and not proved:
                    self._welcome(peer)
                with self._lock:
                    for message in messages:
                        self._roster.hear(peer.channel.task, message)
        except BlockingIOError:
            pass
        except (OSError, Refused, ValueError):
            self._close(peer)
            return
        self._flush(peer)

    def _welcome(self, peer: _Peer) -> None:
        """Begin with a task that has proved itself; its newest connection counts.

        Raises:
            Refused: there is no such task.
        """
        task = peer.channel.task
        if task not in self._names[1:]:
            raise Refused(f"no task {task!r}")
        for other in [each for each in self._peers.values() if each.channel.established and each is not peer]:
            if other.channel.task == task:
                other.channel.send(REPLACED)
                self._flush(other)
                self._close(other)
        if self._told:
            peer.channel.send(self._told)

    def _tell_all(self) -> None:
        """Tell everybody what changed, and close connections on which nothing moves."""
        now = time.monotonic()
        with self._lock:
            try:
                digest = self._roster.digest()
            except (OSError, ValueError):  # a full disk, or a cluster.json that was damaged
                return
        if due := urgent(digest) != urgent(self._told) or now - self._told_at >= PULSE_S:
            self._told, self._told_at, self.news = digest, now, News.of(digest)
        for peer in list(self._peers.values()):
            if due and peer.channel.established:
                peer.channel.send(digest)
            late = not peer.channel.established and now - peer.since > HANDSHAKE_S
            if late or len(peer.channel.unsent) > MAX_UNSENT:
                self._close(peer)
            else:
                self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        """Send as much as the connection takes; the rest waits until it takes more."""
        try:
            while peer.channel.unsent:
                del peer.channel.unsent[: peer.connection.send(peer.channel.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.unsent else 0)
        if self._selector.get_key(peer.connection).events != wanted:
            self._selector.modify(peer.connection, wanted)

    def _close(self, peer: _Peer) -> None:
        if self._peers.pop(peer.connection, None) is None:
            return
        self._selector.unregister(peer.connection)
        joining.close(peer.connection)
        task, others = peer.channel.task, [each.channel for each in self._peers.values()]
        if peer.channel.established and not any(each.established and each.task == task for each in others):
            with self._lock:
                self._roster.closed(task)
