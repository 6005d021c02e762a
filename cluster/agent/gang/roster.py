"""The state of the other agents, from their messages to the chief's agent, and the digest that it sends to all.

Nothing here waits or sends: the hub does, see `hub.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Generation, Heartbeat, Outcome, StopRequest
from cluster.contract.schema import Count, Record

HEARD_S = 3.0
"""A side that has received nothing for this long uses the folder alone; a message is sent every second."""
BEAT_S = 1.5
"""A task without a message for this long has a newer heartbeat in the folder, if any."""
FEW = 32
"""Up to this many tasks are named in a digest; more are `MANY`."""
MANY = None
REPLACED = {"replaced": True}
"""The message to an agent whose task has connected a second time."""


@dataclass(frozen=True, kw_only=True)
class Message(Record):
    """What an agent sends: its newest generation with its record, the outcome, its task's heartbeat.

    Attributes:
        here: whether it is at the rendezvous, where others reach it and it has reached those that it has to.
    """

    number: Count
    begun: Generation | None = None
    outcome: Outcome | None = None
    beat: Heartbeat | None = None
    here: bool = False


@dataclass(frozen=True, kw_only=True)
class News(Record):
    """The digest that the hub sends to every agent.

    Attributes:
        number: the current generation.
        begun: its record.
        outcome: the run's; None while it continues.
        stop: the request to stop; None without one.
        unlinked: the tasks without a connection; None for many.
        absent: the members of the cluster that have not joined the rendezvous yet; None for many.
    """

    number: Count = -1
    begun: Generation | None = None
    outcome: Outcome | None = None
    stop: StopRequest | None = None
    unlinked: frozenset[str] | None = MANY
    absent: frozenset[str] | None = MANY

    @classmethod
    def of(cls, digest: Any) -> News:
        """Return the news in a digest.

        Raises:
            ValueError: it is not valid.
        """
        news = cls.from_json(digest)
        _check_number(news.number, news.begun)
        return news


class Roster:
    """The tasks of a run, for the hub. Times are those of its monotonic clock."""

    def __init__(self, run: RunFolder, names: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any connection.

        Args:
            run: the run; no other thread uses this object.
            names: every task, the chief first.
            clock: returns the seconds of a clock that never jumps.
        """
        self._run, self._clock = run, clock
        self._chief, *self._others = names
        self._members: frozenset[str] = frozenset()
        self._number = -1
        self._outcome: Outcome | None = None
        self._heard: dict[str, float] = {}
        """The time of each connected task's last message."""
        self._beats: dict[str, Heartbeat] = {}
        """The newest heartbeat of each task."""
        self._here: set[str] = set()
        """The tasks at the rendezvous of the current generation."""

    def hear(self, name: str, words: Any) -> None:
        """Process a message of an agent. A message about an earlier generation is ignored.

        Raises:
            ValueError: the message is not valid.
        """
        said = Message.from_json(words)
        if said.begun is not None and said.number > self._number:
            _check_number(said.number, said.begun)
            self._run.learn(said.begun)
            self._look_at_generation()
        self._heard[name] = self._clock()
        if said.number != self._number:
            return
        self._outcome = self._outcome or said.outcome
        if said.here:
            self._here.add(name)
        beat = said.beat
        if beat and (beat.task, beat.generation) == (name, self._number):
            self._beats[name] = beat

    def closed(self, name: str) -> None:
        """Note that a task has no connection any more."""
        self._heard.pop(name, None)
        self._beats.pop(name, None)

    def come(self, number: int) -> None:
        """Note that the chief is at the rendezvous of a generation."""
        if number == self._number:
            self._here.add(self._chief)

    def beat(self, name: str) -> Heartbeat | None:
        """Return the newest heartbeat of a task with a recent message; None if the folder has a newer one."""
        heard = self._clock() - self._heard.get(name, float("-inf")) < BEAT_S
        return self._beats.get(name) if heard else None

    def _look_at_generation(self) -> None:
        if (number := self._run.generation) != self._number:
            self._number, self._here, self._beats = number, set(), {}
            self._members = frozenset(task.name for task in membership.cluster(self._run, number).members)

    def digest(self) -> dict[str, Any]:
        """Return the digest for the others, from the folder and their messages."""
        self._look_at_generation()
        self._outcome = self._outcome or self._run.outcome
        now = self._clock()
        linked = {name for name, heard in self._heard.items() if now - heard < HEARD_S}
        news = News(
            number=self._number,
            begun=self._run.begun(self._number),
            outcome=self._outcome,
            stop=self._run.stop_request,
            unlinked=_few(set(self._others) - linked),
            absent=_few(self._members - self._here),
        )
        return news.to_json()


def _check_number(number: int, begun: Generation | None) -> None:
    if begun is not None and begun.generation != number:
        raise ValueError(f"generation: expected {number}")


def urgent(digest: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a digest for which others wait; of the absent tasks only whether there are any."""
    return digest | {"unlinked": [], "absent": digest.get("absent") == []}


def _few(names: Collection[str]) -> frozenset[str] | None:
    return frozenset(names) if len(names) <= FEW else MANY
