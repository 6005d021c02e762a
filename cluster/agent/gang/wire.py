"""Authenticated messages in frames between two agents, independent of the connection.

    hub    -> agent   a nonce
    agent  -> hub     a nonce, its proof, its task's name
    hub    -> agent   its proof
    both              messages: a MAC, JSON

A proof is an HMAC-SHA256 with the run's token over the role, both nonces and the name, so it serves neither again nor
in the other direction. Messages are authenticated with a key of their connection, over their direction and number: none
can be forged, repeated, left out or reordered. Nothing is encrypted; no message holds a secret.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

from cluster.system.json_files import parse_json

NONCE_BYTES = 32
MAC_BYTES = 32
LENGTH_BYTES = 4
MAX_HANDSHAKE_BYTES = 256
"""The longest frame before the proof."""
MAX_BYTES = 2**20
"""The longest frame. The digest of the largest cluster has a tenth of that."""


class Refused(Exception):  # as in ConnectionRefusedError
    """The other side does not know the token, or sent something else than a message."""


class Channel:
    """One side of a connection: turns received bytes into messages, and messages into bytes to send."""

    def __init__(self, token: str, task: str = "") -> None:
        """Begin as the agent of a task, or without one as the hub.

        Args:
            token: the run's secret.
            task: the task's name.
        """
        self._token, self._hub = token.encode(), not task
        self.task = task
        """The task at the agent's side; the hub knows it once the agent has proved itself."""
        self.established = False
        self.unsent = bytearray()
        """The bytes to send; the caller removes them as they are sent."""
        self._received = bytearray()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._key = b""
        self._counts = {True: 0, False: 0}
        """The messages so far, by whether the hub sent them."""
        if self._hub:
            self._put(self._nonce)

    def send(self, message: dict[str, Any]) -> None:
        """Add a message to the bytes to send; only on an established channel."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self._put(self._mac_of(body, self._hub) + body)

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with these bytes.

        Raises:
            Refused: the other side broke the protocol; the connection is to be closed.
        """
        self._received += data
        messages = []
        while (frame := self._frame()) is not None:
            if self.established:
                messages.append(self._opened(frame))
            elif self._hub:
                self._check_agent(frame)
            else:
                self._check_hub(frame)
        return messages

    def _frame(self) -> bytes | None:
        """Remove and return the next whole frame of the received bytes."""
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

    def _check_agent(self, frame: bytes) -> None:
        """Check an agent's proof, and answer with the hub's."""
        nonce, proof = frame[:NONCE_BYTES], frame[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]
        self.task = frame[NONCE_BYTES + MAC_BYTES :].decode(errors="replace")
        self._nonces = self._nonce + nonce
        if len(nonce) < NONCE_BYTES or not hmac.compare_digest(proof, self._proof(b"agent")):
            raise Refused("an agent's proof is wrong")
        self._put(self._proof(b"hub"))
        self._establish()

    def _check_hub(self, frame: bytes) -> None:
        """Prove this side to the hub, then check the hub's proof."""
        if not self._nonces:
            if len(frame) != NONCE_BYTES:
                raise Refused("the hub's nonce is wrong")
            self._nonces = frame + self._nonce
            self._put(self._nonce + self._proof(b"agent") + self.task.encode())
        elif hmac.compare_digest(frame, self._proof(b"hub")):
            self._establish()
        else:
            raise Refused("the hub's proof is wrong")

    def _proof(self, role: bytes) -> bytes:
        return hmac.digest(self._token, b"\0".join((role, self._nonces, self.task.encode())), "sha256")

    def _establish(self) -> None:
        self._key = self._proof(b"messages")
        self.established = True

    def _mac_of(self, body: bytes, by_hub: bool) -> bytes:
        number = self._counts[by_hub]
        self._counts[by_hub] += 1
        return hmac.digest(self._key, b"%d %d " % (by_hub, number) + body, "sha256")

    def _opened(self, frame: bytes) -> dict[str, Any]:
        mac, body = frame[:MAC_BYTES], frame[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac_of(body, not self._hub)):
            raise Refused("a message is forged, repeated or out of order")
        try:
            message = parse_json(body, MAX_BYTES)
        except ValueError as error:
            raise Refused(f"a message is damaged: {error}") from None
        if not isinstance(message, dict):
            raise Refused("a message is not an object")
        return message
