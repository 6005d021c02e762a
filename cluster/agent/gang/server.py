"""Accepts connections of agents and exchanges authenticated messages with them, in one thread.

Anyone on the network can connect. So nothing waits for a single connection: those without a proof are few, have little
time and may send only a few bytes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any

from cluster.agent.gang.wire import Channel, Refused

HANDSHAKE_S = 5.0
"""Longest time from a connection to the proof."""
MAX_UNPROVED = 64
"""How many connections may be without a proof at a time, in addition to one for each task."""
MAX_UNSENT = 2**20
"""A connection is closed once this many bytes wait because the other side does not read."""
READ_BYTES = 2**16


class Peer:
    """A connection."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self.channel = connection, Channel(token)
        self.since = time.monotonic()


class Server:
    """The listening side of authenticated connections. Subclasses act on their events."""

    def __init__(self, listener: socket.socket, token: str, max_peers: int) -> None:
        """Prepare to accept connections.

        Args:
            listener: a listening socket.
            token: the secret that peers prove to know.
            max_peers: how many peers may connect at the same time.
        """
        self._listener, self._token = listener, token
        self._max_unproved = MAX_UNPROVED + max_peers
        self._peers: dict[socket.socket, Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def on_open(self, peer: Peer) -> None:
        """Act on a peer that has proved itself; raise `Refused` to close the connection."""

    def on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        """Act on a message; raise `Refused` or ValueError to close the connection."""

    def on_close(self, peer: Peer) -> None:
        """Act on the end of a connection."""

    def serve(self, timeout_s: float) -> None:
        """Accept connections, receive and send for at most `timeout_s`, or until something happened."""
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif peer := self._peers.get(key.fileobj):  # type: ignore[call-overload]
                self._exchange(peer, events)
        for peer in self._unproved():
            if time.monotonic() - peer.since > HANDSHAKE_S:
                self._close(peer)

    def shut_down(self) -> None:
        """Close every connection and the listener."""
        for peer in list(self._peers.values()):
            self._close(peer)
        self._selector.close()
        self._listener.close()

    def _unproved(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if not peer.channel.established]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(unproved := self._unproved()) >= self._max_unproved:
                self._close(min(unproved, key=lambda peer: peer.since))
            connection.setblocking(False)
            peer = self._peers[connection] = Peer(connection, self._token)
            self._selector.register(connection, selectors.EVENT_READ)
            self._flush(peer)

    def _exchange(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                if not (data := peer.connection.recv(READ_BYTES)):
                    raise ConnectionResetError
                proved = peer.channel.established
                messages = peer.channel.receive(data)
                if peer.channel.established and not proved:
                    self.on_open(peer)
                for message in messages:
                    self.on_message(peer, message)
        except BlockingIOError:
            pass
        except (OSError, Refused, ValueError):
            self._close(peer)
            return
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        """Send as much as the connection takes; the rest waits until it takes more."""
        try:
            while peer.channel.unsent:
                del peer.channel.unsent[: peer.connection.send(peer.channel.unsent)]
        except BlockingIOError:
            if len(peer.channel.unsent) > MAX_UNSENT:
                return self._close(peer)
        except OSError:
            return self._close(peer)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.channel.unsent else 0)
        if self._selector.get_key(peer.connection).events != wanted:
            self._selector.modify(peer.connection, wanted)
        return None

    def _close(self, peer: Peer) -> None:
        if self._peers.pop(peer.connection, None) is None:
            return
        self._selector.unregister(peer.connection)
        with contextlib.suppress(OSError):
            peer.connection.close()
        self.on_close(peer)
