"""The link: an agent's connection to the hub, made again whenever it breaks."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

from cluster.agent.gang.roster import HEARD_S, REPLACED, News
from cluster.agent.gang.wire import Channel, Refused
from cluster.contract.run import joining
from cluster.contract.run.copies import Copy
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import Invitation
from cluster.contract.run.records import Generation, Heartbeat, Outcome

LOOK_S = 0.5
"""How often the task's own heartbeat is read; a new one is sent at once."""
PULSE_S = 1.0
"""How often a message is sent even without a change."""
RETRY_S = 0.5
LONGEST_RETRY_S = 5.0
CONNECT_S = 2.0
READ_BYTES = 2**16


class Link:
    """A task's end of its connection. Only its thread waits."""

    def __init__(self, run: RunFolder, task: str, copy: Copy | None = None) -> None:
        """Begin to connect, for this copy of the task if there may be several."""
        self._run, self._task, self._copy = RunFolder(run.path), task, copy
        self.news = News()
        """The last digest of the hub."""
        self._heard = float("-inf")
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
        return time.monotonic() - self._heard < HEARD_S

    def tell(self, number: int, begun: Generation | None, outcome: Outcome | None) -> None:
        """Send a generation and the outcome to the hub."""
        before, ended = self._message, outcome and outcome.to_json()
        if (before["number"], before.get("outcome")) != (number, ended):
            here = number == before["number"] and before.get("here", False)
            self._say({"number": number, "begun": begun and begun.to_json(), "outcome": ended, "here": here})

    def come(self, number: int) -> None:
        """Report that this task is at the rendezvous of a generation, and that the connections that it needs work."""
        if number == self._message["number"] and not self._message.get("here"):
            self._say(self._message | {"here": True})

    def close(self) -> None:
        """Close the connection for good."""
        self._stopped = True
        self._wake()
        self._thread.join(CONNECT_S + 1)

    def _say(self, message: dict[str, Any]) -> None:
        self._message = message
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough
            self._waker.send(b"\0")

    def _keep(self) -> None:
        pause_s = RETRY_S
        while not self._stopped:
            began = time.monotonic()
            with contextlib.suppress(OSError, Refused, ValueError):
                if self._copy and self._copy.is_superseded:
                    return  # its connection would take the place of the newer copy's
                if found := joining.invitation(self._run):
                    self._hold(found)
            self._heard = float("-inf")
            lasted = time.monotonic() - began > HEARD_S
            pause_s = RETRY_S if lasted else min(LONGEST_RETRY_S, pause_s * 1.5)
            deadline = time.monotonic() + pause_s
            while not self._stopped and (left_s := deadline - time.monotonic()) > 0:
                self._await(left_s)

    def _await(self, seconds: float, *sockets: socket.socket) -> bool:
        """Wait until one of these can be read, or a message is to be sent."""
        poll = select.poll()
        for each in (self._woken, *sockets):
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(READ_BYTES)
        return any(each.fileno() in ready for each in sockets)

    def _hold(self, hub: Invitation) -> None:
        """Exchange messages with the hub until the connection breaks."""
        channel = Channel(joining.token(self._run), self._task)
        with socket.create_connection((hub.host, hub.port), CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            heard = looked = sent_at = time.monotonic()
            looked -= LOOK_S
            sent: dict[str, Any] = {}
            beat: Heartbeat | None = None
            while not self._stopped:
                now = time.monotonic()
                if channel.established and self._message["number"] >= 0:
                    if now - looked >= LOOK_S:
                        looked, beat = now, self._run.heartbeat(self._task)
                    message = self._message | {"beat": beat and beat.to_json()}
                    if message != sent or now - sent_at >= PULSE_S:
                        channel.send(message)
                        sent, sent_at = message, now
                if channel.unsent:
                    connection.sendall(channel.unsent)  # or fails after the timeout: the hub takes nothing
                    channel.unsent.clear()
                if now - heard > HEARD_S:
                    raise TimeoutError
                if self._await(LOOK_S, connection):
                    if not (data := connection.recv(READ_BYTES)):
                        raise ConnectionResetError
                    for digest in channel.receive(data):
                        self._take(digest)
                        heard = time.monotonic()

    def _take(self, digest: dict[str, Any]) -> None:
        """Process a message of the hub."""
        if digest == REPLACED:
            self._stopped = True  # a newer copy of this task has connected: this one uses the folder alone
        else:
            self.news, self._heard = News.of(digest), time.monotonic()
