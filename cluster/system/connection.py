"""Authenticated connections between two processes: the protocol, its server, and its client.

    server -> client   a nonce
    client -> server   a nonce, its proof, its task's name
    server -> client   its proof
    both               messages: a MAC, JSON

A proof is an HMAC-SHA256, keyed with the shared token, over the side's role, both nonces and the task's name, so it
cannot be replayed or reflected. Each message has a MAC with the connection's key over its direction, number and body:
no message can be forged, repeated, left out or reordered. Nothing is encrypted; no message contains a secret.

Anyone on the network can connect. So a server never blocks on one connection, and limits the number, time and bytes of
connections that have not sent a proof yet.
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from typing import Any, Self

from cluster.system.json_files import parse_json

NONCE_BYTES = 32
MAC_BYTES = 32
LENGTH_BYTES = 4
MAX_HANDSHAKE_BYTES = 256
"""The longest frame before the proof."""
MAX_BYTES = 2**20
"""The longest frame, ten times the digest of the largest cluster."""


class Refused(Exception):  # as in ConnectionRefusedError
    """The other side does not know the token, or violated the protocol."""


class Channel:
    """The protocol state of one side: turns received bytes into messages, and messages into bytes to send."""

    def __init__(self, token: str, task: str = "") -> None:
        """Begin as the client of a task, or as the server if `task` is empty. Both prove that they know the token."""
        self._token, self._serves = token.encode(), not task
        self.task = task
        """The client's task; on the server only reliable once the channel is established."""
        self.established = False
        self.unsent = bytearray()
        """The bytes to send; the caller removes them as they are sent."""
        self._received = bytearray()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._key = b""
        self._counts = {True: 0, False: 0}
        """The number of messages so far: the server's under True, the client's under False."""
        if self._serves:
            self._put(self._nonce)

    def send(self, message: dict[str, Any]) -> None:
        """Append a message to the bytes to send; the channel must be established."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self._put(self._mac_of(body, self._serves) + body)

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that these bytes complete; raise `Refused` on a violation of the protocol."""
        self._received += data
        messages = []
        while (frame := self._frame()) is not None:
            if self.established:
                messages.append(self._opened(frame))
            elif self._serves:
                self._check_client(frame)
            else:
                self._check_server(frame)
        return messages

    def _frame(self) -> bytes | None:
        """Remove and return the next complete frame of the received bytes; None without one."""
        if len(self._received) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
        if end - LENGTH_BYTES > (MAX_BYTES if self.established else MAX_HANDSHAKE_BYTES):
            raise Refused("a frame is too long")
        if len(self._received) < end:
            return None
        frame = bytes(self._received[LENGTH_BYTES:end])
        del self._received[:end]
        return frame

    def _put(self, body: bytes) -> None:
        self.unsent += len(body).to_bytes(LENGTH_BYTES, "big") + body

    def _check_client(self, frame: bytes) -> None:
        nonce, proof = frame[:NONCE_BYTES], frame[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]
        self.task = frame[NONCE_BYTES + MAC_BYTES :].decode(errors="replace")
        self._nonces = self._nonce + nonce
        if len(nonce) < NONCE_BYTES or not hmac.compare_digest(proof, self._proof(b"client")):
            raise Refused("the client's proof is wrong")
        self._put(self._proof(b"server"))
        self._establish()

    def _check_server(self, frame: bytes) -> None:
        """Prove this side to the server, then check the server's proof."""
        if not self._nonces:
            if len(frame) != NONCE_BYTES:
                raise Refused("the server's nonce is wrong")
            self._nonces = frame + self._nonce
            self._put(self._nonce + self._proof(b"client") + self.task.encode())
        elif hmac.compare_digest(frame, self._proof(b"server")):
            self._establish()
        else:
            raise Refused("the server's proof is wrong")

    def _proof(self, role: bytes) -> bytes:
        return hmac.digest(self._token, b"\0".join((role, self._nonces, self.task.encode())), "sha256")

    def _establish(self) -> None:
        self._key = self._proof(b"messages")
        self.established = True

    def _mac_of(self, body: bytes, by_server: bool) -> bytes:
        number = self._counts[by_server]
        self._counts[by_server] += 1
        return hmac.digest(self._key, b"%d %d " % (by_server, number) + body, "sha256")

    def _opened(self, frame: bytes) -> dict[str, Any]:
        mac, body = frame[:MAC_BYTES], frame[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac_of(body, not self._serves)):
            raise Refused("a message is forged, repeated or out of order")
        try:
            message = parse_json(body, MAX_BYTES)
        except ValueError as error:
            raise Refused(f"a message is damaged: {error}") from None
        if not isinstance(message, dict):
            raise Refused("a message is not an object")
        return message


TICK_S = 0.1
HANDSHAKE_S = 5.0
"""Longest time from a connection to its proof."""
MAX_UNPROVED = 64
"""Limit of simultaneous connections without a proof, in addition to one for each task."""
MAX_UNSENT = 2**20
"""A connection is closed once more bytes than this are unsent because the other side does not read."""
READ_BYTES = 2**16


class PeerConnection:
    """A client's connection on the server, with its protocol state."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self.channel = connection, Channel(token)
        self.since = time.monotonic()


class Server:
    """The listening side of authenticated connections. One thread serves them all; subclasses override callbacks."""

    def __init__(self, listener: socket.socket, token: str, max_peers: int) -> None:
        self._listener, self._token = listener, token
        self._max_unproved = MAX_UNPROVED + max_peers
        self._peers: dict[socket.socket, PeerConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Close every connection and the listener, after a final `on_tick`."""
        self._stopped = True
        self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        while not self._stopped:
            for key, events in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif peer := self._peers.get(key.fileobj):  # type: ignore[call-overload]
                    self._exchange(peer, events)
            for peer in self._unproved():
                if time.monotonic() - peer.since > HANDSHAKE_S:
                    self._close(peer)
            self.on_tick()
        self.on_tick()
        for peer in list(self._peers.values()):
            self._close(peer)
        self._selector.close()
        self._listener.close()

    def on_tick(self) -> None:
        """Callback at least every `TICK_S`, after any other callbacks."""

    def on_open(self, peer: PeerConnection) -> None:
        """Callback for a peer that has proved itself; raise `Refused` to close the connection."""

    def on_message(self, peer: PeerConnection, message: dict[str, Any]) -> None:
        """Callback for a message; raise `Refused` or ValueError to close the connection."""

    def on_close(self, peer: PeerConnection) -> None:
        """Callback for a closed connection, with or without proof."""

    def _unproved(self) -> list[PeerConnection]:
        return [peer for peer in self._peers.values() if not peer.channel.established]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(unproved := self._unproved()) >= self._max_unproved:
                self._close(min(unproved, key=lambda peer: peer.since))
            connection.setblocking(False)
            peer = self._peers[connection] = PeerConnection(connection, self._token)
            self._selector.register(connection, selectors.EVENT_READ)
            self._flush(peer)

    def _exchange(self, peer: PeerConnection, events: int) -> None:
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

    def _flush(self, peer: PeerConnection) -> None:
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

    def _close(self, peer: PeerConnection) -> None:
        if self._peers.pop(peer.connection, None) is None:
            return
        self._selector.unregister(peer.connection)
        with contextlib.suppress(OSError):
            peer.connection.close()
        self.on_close(peer)


class Client:
    """The client side of a connection, a context manager. Calls block for at most the timeout."""

    def __init__(self, address: tuple[str, int], token: str, task: str, timeout_s: float) -> None:
        """Connect, and let both sides prove that they know the token.

        Raises OSError if nothing answers in time, EOFError if the server rejects this side's proof, and `Refused` if a
        server of another protocol, or without the token, answers.
        """
        deadline = time.monotonic() + timeout_s
        self._channel = Channel(token, task)
        self._socket = socket.create_connection(address, timeout_s)
        self.first: list[dict[str, Any]] = []
        """The messages that arrived together with the server's proof."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._channel.established:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self.first = self.receive()
                self._flush()
            self._socket.settimeout(timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self._channel.send(message)
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """Wait for data; return the messages that it completes; raise EOFError once the server has closed."""
        if not (data := self._socket.recv(READ_BYTES)):
            raise EOFError
        return self._channel.receive(data)

    def _flush(self) -> None:
        if self._channel.unsent:
            self._socket.sendall(self._channel.unsent)
            self._channel.unsent.clear()
