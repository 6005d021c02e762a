"""Connections between simulated agents: the hub's own roster and the board's own code, over messages that get lost.

A message is dropped, late, or comes a second time when it is old, and connections are cut for a while.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from cluster.agent.hub import SILENCE_S, News, Outgoing, Roster
from cluster.agent.run_view import RunView
from cluster.contract.run.joining import Superseded
from cluster.contract.spec import ClusterSpec, Role, Task
from tests.simulation.folder import SimFolder
from tests.simulation.world import SimTask

TICK_S = 0.5
DROPPED_SHARE = 0.1
REPEATED_SHARE = 0.1
LATEST_S = 0.4
REPEATED_AFTER_S = 8.0


class SimCopy:
    """Replaces `Copy`."""

    def __init__(self, owner: SimTask) -> None:
        self._owner = owner

    def require_newest(self) -> None:
        """Look at the record of the newest copy, whose contents are never old."""
        self._owner.world.operation("look for a newer copy")
        if self._owner.superseded:
            raise Superseded(f"a newer copy of {self._owner.name} has begun")


class SimRunView(RunView):
    def __init__(self, folder: SimFolder, owner: SimTask) -> None:
        super().__init__(folder.seen_by(owner), SimCopy(owner) if owner.world.copied else None)  # type: ignore[arg-type]
        self._owner = owner

    def connect(self, spec: ClusterSpec, task: Task, host: str) -> None:
        if not self._owner.world.linked or len(spec.tasks) == 1:
            return
        if task.role == Role.CHIEF:
            self._hub = SimHub(self._owner, spec)  # type: ignore[assignment]
        else:
            self._link = SimHubClient(self._owner)  # type: ignore[assignment]


class SimEnd:
    """One end of the connections, of one incarnation of an agent."""

    bell = True
    """Its agent is woken at any time."""

    def __init__(self, owner: SimTask) -> None:
        self.owner, self.world, self.thread = owner, owner.world, owner.thread
        self.closed = False
        self.sent = 0
        self.received: dict[tuple[SimHubClient, SimEnd], int] = {}
        """The newest message of each connection, which is between a link and a hub."""
        self.news = News()

    @property
    def gone(self) -> bool:
        """Whether the agent has ended or was killed."""
        return self.closed or not self.owner.alive or self.owner.thread is not self.thread

    @property
    def frozen(self) -> bool:
        return self.owner.frozen_until > self.world.now

    def close(self) -> None:
        self.closed = True

    def send(self, link: SimHubClient, to: SimEnd, what: Any) -> None:
        """Let a message come to the other end of a connection: late, twice or not at all."""
        world, dice = self.world, self.world.random
        self.sent += 1
        number = self.sent
        if dice.random() >= DROPPED_SHARE and not world.is_cut(link.owner.name):
            world.at(dice.uniform(0, LATEST_S), lambda: to.receive(self, link, number, what))
        if dice.random() < REPEATED_SHARE:
            world.at(dice.uniform(LATEST_S, REPEATED_AFTER_S), lambda: to.receive(self, link, number, what))

    def receive(self, by: SimEnd, link: SimHubClient, number: int, what: Any) -> None:
        """Refuse a message that has come before or too late, as `wire.Channel` does."""
        if self.gone or link.gone or (by.gone and self.world.hub not in (by, self)):
            return
        if self.frozen:
            self.world.at(self.owner.frozen_until - self.world.now, lambda: self.receive(by, link, number, what))
        elif number > self.received.get((link, by), 0):
            self.received[link, by] = number
            self.process(link, what)

    def process(self, link: SimHubClient, what: Any) -> None:
        raise NotImplementedError


class SimHub(SimEnd):
    """Replaces `Hub`."""

    def __init__(self, owner: SimTask, spec: ClusterSpec) -> None:
        super().__init__(owner)
        names = [task.name for task in spec.tasks]
        self.roster = Roster(self.world.folder.seen_by(owner), names, clock=lambda: self.world.now)
        self.beat, self.join_rendezvous = self.roster.beat, self.roster.join_rendezvous
        self.world.hub = self
        self.world.at(0.0, self._tick)

    fresh = True

    def _tick(self) -> None:
        if self.gone or self.world.hub is not self:  # the links follow the record to the newest hub
            return
        if not self.frozen:
            digest = json.loads(json.dumps(self.roster.digest()))
            self.news = News.from_digest(digest)
            for name, link in self.world.links.items():
                if link.gone:
                    self.roster.closed(name)
                else:
                    self.send(link, link, digest)
        self.world.at(TICK_S, self._tick)

    def process(self, link: SimHubClient, what: Any) -> None:
        self.roster.receive(link.owner.name, what)


class SimHubClient(SimEnd):
    """Replaces `Link`."""

    def __init__(self, owner: SimTask) -> None:
        super().__init__(owner)
        self.received_at = float("-inf")
        self.outgoing = Outgoing()
        self.report, self.join_rendezvous = self.outgoing.report, self.outgoing.join_rendezvous
        self.world.links[owner.name] = self
        self.world.at(self.world.random.uniform(0, 1), self._tick)

    @property
    def fresh(self) -> bool:
        return self.world.now - self.received_at < SILENCE_S

    def _tick(self) -> None:
        if self.gone or self.world.links[self.owner.name] is not self:  # that of a newer copy counts
            return
        hub = self.world.hub
        if hub and not hub.gone and not self.frozen and self.outgoing.message.number >= 0:
            beat = self.world.folder.beats.get(self.owner.name)
            message = replace(self.outgoing.message, beat=beat.read() if beat else None)
            self.send(self, hub, json.loads(json.dumps(message.to_json())))
        self.world.at(TICK_S, self._tick)

    def process(self, link: SimHubClient, what: Any) -> None:
        self.news, self.received_at = News.from_digest(what), self.world.now
