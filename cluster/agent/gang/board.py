"""The run as one agent sees it: the folder, and the messages of the other agents."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cluster.agent.gang.hub import Hub
from cluster.agent.gang.link import Link
from cluster.agent.gang.roster import News
from cluster.contract.run.copies import Copy
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import AfterStop, Heartbeat, Outcome, StopRequest
from cluster.contract.spec import ClusterSpec, Role, Task

READ_S = 2.0
"""How often an agent reads the folder for changes that the hub would report."""

T = TypeVar("T")


class Board(RunFolder):
    """The run folder, of which less is read while the hub is connected.

    Every write goes to the folder, which decides who was first. A generation or outcome that the hub reports came from
    a record there and counts at once, since these never change; a folder on another machine may show it late.
    """

    _hub: Hub | None
    """In the chief's agent."""
    _link: Link | None
    """In any other agent."""
    _read: dict[str, tuple[float, Any]]
    _ended: Outcome | None
    _newest: int
    """The newest generation that this agent has seen."""
    _copy: Copy | None
    """The copy of the task that this agent is of."""

    def __init__(self, path: Path, copy: Copy | None = None) -> None:
        super().__init__(path)
        self.__dict__ |= {"_hub": None, "_link": None, "_read": {}, "_ended": None, "_newest": -1, "_copy": copy}

    def join(self, spec: ClusterSpec, task: Task, host: str) -> None:
        """Connect with the other agents. Without connections they use the folder alone.

        Args:
            spec: every requested task.
            task: this agent's.
            host: the address at which it listens.
        """
        if len(spec.tasks) == 1:
            return
        with contextlib.suppress(OSError):
            if task.role == Role.CHIEF:
                self.__dict__["_hub"] = Hub(self, spec, host)
            else:
                self.__dict__["_link"] = Link(self, task.name, self._copy)

    def leave(self) -> None:
        """Close this agent's connections. Everything is read from the folder again."""
        side = self._side
        self.__dict__ |= {"_hub": None, "_link": None}
        if side:
            side.close()

    @property
    def _side(self) -> Hub | Link | None:
        return self._hub or self._link

    # Reads that are less frequent with a connection

    @property
    def relieved(self) -> bool:
        """Whether the chief's agent watches the others for this one, and reports changes to it."""
        return self._link is not None and self.gathers

    def _at_times(self, what: str, read: Callable[[], T]) -> T:
        """Read the folder, or return the value of at most `READ_S` ago if the hub would have reported a change."""
        at, value = self._read.get(what, (float("-inf"), None))
        now = time.monotonic()
        if not self.relieved or now - at >= READ_S:
            value = read()
            self._read[what] = (now, value)
        found: T = value
        return found

    @property
    def gathers(self) -> bool:
        """Whether the hub is connected, and knows the newest generation that this agent knows."""
        return (side := self._side) is not None and side.fresh and side.news.number >= self._newest

    def _news(self) -> News:
        """Return the hub's last news; empty if it is not connected, or knows only an earlier generation."""
        return side.news if (side := self._side) and self.gathers else News()

    @property
    def generation(self) -> int:
        """The current generation, counted from 0."""
        if begun := self._news().begun:
            self.learn(begun)
        number = max(self._at_times("generation", self._read_generation), *self._begun, 0)
        self.__dict__["_newest"] = number
        if self._link:
            self._link.tell(number, self.begun(number), self._ended)
        return number

    def _read_generation(self) -> int:
        return super().generation

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it continues. It stays so for as long as this agent lives."""
        if self._ended is None:
            self.__dict__["_ended"] = self._news().outcome or self._at_times("outcome", self._read_outcome)
        return self._ended

    def _read_outcome(self) -> Outcome | None:
        return super().outcome

    @property
    def stop_request(self) -> StopRequest | None:
        """The request to save and stop; None without one."""
        return self._news().stop or self._at_times("stop", self._read_stop)

    def _read_stop(self) -> StopRequest | None:
        return super().stop_request

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
            return self._read_outcome() is None and super().begin_generation(number, **why)
        finally:
            self._read.clear()

    def end(self, state: str, **why: Any) -> bool:
        """Record the outcome unless another task has; return whether this call did."""
        self.require_newest()
        try:
            return super().end(state, **why)
        finally:
            self._read.clear()

    def request_stop(self, by: str, *, then: str = AfterStop.END) -> bool:
        """Request that every task saves at the same step and stops; return False if that was requested before."""
        self.require_newest()
        try:
            return super().request_stop(by, then=then)
        finally:
            self._read.clear()

    # The other tasks

    def heartbeat(self, task: str) -> Heartbeat | None:
        """Return a task's newest heartbeat; None without a valid one."""
        return (self._hub.beat(task) if self._hub else None) or super().heartbeat(task)

    def recorded_heartbeat(self, task: str) -> Heartbeat | None:
        """Return a task's newest heartbeat in the folder; None without a valid one."""
        return super().heartbeat(task)

    @property
    def unlinked(self) -> frozenset[str] | None:
        """The tasks without a connection to the hub, so that their heartbeats in the folder count; None for all."""
        return self._news().unlinked if self.relieved else None

    def hears(self, task: str) -> bool:
        """Return whether a task is connected to the hub, as far as this agent knows."""
        unlinked = self._news().unlinked
        return unlinked is not None and task not in unlinked

    # The rendezvous

    def come(self, number: int) -> None:
        """Report that this task is at the rendezvous of a generation, and that the connections that it needs work."""
        if side := self._side:
            side.come(number)

    def absent(self, number: int) -> frozenset[str] | None:
        """Return the tasks that are not at the rendezvous of a generation yet; None if unknown, or for many."""
        news = self._news()
        return news.absent if news.number == number else None
