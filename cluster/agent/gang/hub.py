"""The hub: in the chief's agent, accepts one connection from each other agent and sends a digest to all.

One thread serves all connections. It sends a digest every `PULSE_S`, and within `TICK_S` after a change for which
others wait: O(N) messages a second for N tasks, also while these join the rendezvous one by one.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from cluster.agent.gang.roster import HEARD_S, REPLACED, News, Roster, urgent
from cluster.agent.gang.server import HANDSHAKE_S, Peer, Server
from cluster.agent.gang.wire import Refused
from cluster.contract.run import joining
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Heartbeat
from cluster.contract.spec import ClusterSpec

TICK_S = 0.1
PULSE_S = 1.0


class Hub(Server):
    """The chief's end of the connections."""

    def __init__(self, run: RunFolder, spec: ClusterSpec, host: str) -> None:
        """Listen, and record where.

        Args:
            run: the run.
            spec: every requested task, the chief first.
            host: the address to bind.

        Raises:
            OSError: no port is free, or the record cannot be written.
        """
        self._names = [task.name for task in spec.tasks]
        super().__init__(*joining.invite(run, spec.tasks[0], host), len(spec.tasks))
        self._roster = Roster(RunFolder(run.path), self._names)
        self._lock = threading.Lock()
        """Guards the roster."""
        self._told: dict[str, Any] = {}
        self._told_at = 0.0
        self._stopped = False
        self.news = News()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    @property
    def fresh(self) -> bool:
        """Whether the thread runs."""
        return time.monotonic() - self._told_at < HEARD_S

    def beat(self, task: str) -> Heartbeat | None:
        """Return a connected task's newest heartbeat; None if the folder has a newer one."""
        with self._lock:
            return self._roster.beat(task)

    def come(self, number: int) -> None:
        """Report that the chief is at the rendezvous of a generation, and others reach it."""
        with self._lock:
            self._roster.come(number)

    def close(self) -> None:
        """Send a last digest, and close every connection."""
        self._stopped = True
        self._thread.join(HANDSHAKE_S)

    def _run(self) -> None:
        looked = 0.0
        while not self._stopped:
            self.serve(TICK_S)
            if time.monotonic() - looked >= TICK_S:
                looked = time.monotonic()
                self._tell_all()
        self._tell_all()
        self.shut_down()

    def on_open(self, peer: Peer) -> None:
        """Accept the connection of a task that has proved itself; its newest connection counts.

        Raises:
            Refused: the task does not exist.
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

    def on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        """Process a message of an agent."""
        with self._lock:
            self._roster.hear(peer.channel.task, message)

    def on_close(self, peer: Peer) -> None:
        """Note that a task has no connection any more, unless it has a newer one."""
        task, others = peer.channel.task, [each.channel for each in self._peers.values()]
        if peer.channel.established and not any(each.established and each.task == task for each in others):
            with self._lock:
                self._roster.closed(task)

    def _tell_all(self) -> None:
        """Send the digest to every task if it is due."""
        now = time.monotonic()
        with self._lock:
            try:
                digest = self._roster.digest()
            except (OSError, ValueError):  # a full disk, or a cluster.json that was damaged
                return
        if urgent(digest) != urgent(self._told) or now - self._told_at >= PULSE_S:
            self._told, self._told_at, self.news = digest, now, News.of(digest)
            for peer in [each for each in self._peers.values() if each.channel.established]:
                peer.channel.send(digest)
                self._flush(peer)
