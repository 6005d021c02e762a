"""The run as one agent sees it: the run folder, and the other agents' messages through the chief's hub."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cluster.agent.hub import Hub, HubClient, News
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.records import AfterStop, Generation, Heartbeat, Outcome, OutcomeState
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.waiting import Bell

T = TypeVar("T")

READ_S = 2.0
"""How often an agent reads the folder for changes that the hub would report."""


class RunView:
    """The run folder, read less often while the hub is connected.

    Every write goes to the folder, which decides which task was first. A generation or outcome from the hub is a copy
    of a record there. It counts immediately, since these records never change; a network file system may show it late.
    """

    def __init__(self, folder: RunFolder, copy: TaskCopy | None = None) -> None:
        self.folder = folder
        """The run folder; `RunFolder.learn` adds generations from the hub before the file system shows them."""
        self._copy = copy
        self._hub: Hub | None = None
        """Set in the chief's agent."""
        self._link: HubClient | None = None
        """Set in any other agent."""
        self._read: dict[str, tuple[float, Any]] = {}
        self._ended: Outcome | None = None
        self._newest = -1
        """The newest generation that this agent has seen."""
        self._stop_seen = 0.0
        """When this agent first saw the stop request, by the monotonic clock; 0 without one."""

    def connect(self, spec: ClusterSpec, task: Task, host: str) -> None:
        """Connect the agents of all requested tasks: the chief's listens on `host`, the others connect to it.

        An agent without a connection uses only the folder.
        """
        if len(spec.tasks) == 1:
            return
        with contextlib.suppress(OSError):
            if task.role == Role.CHIEF:
                self._hub = Hub(self.folder, spec, host)
            else:
                self._link = HubClient(self.folder, task.name, self._copy)

    def disconnect(self) -> None:
        """Close this agent's connections, and read everything from the folder again."""
        side = self._side
        self._hub = self._link = None
        if side:
            side.close()

    @property
    def _side(self) -> Hub | HubClient | None:
        return self._hub or self._link

    @property
    def bell(self) -> Bell | None:
        """Rings at each digest of the hub; None without a connection."""
        return side.bell if (side := self._side) else None

    # Reads that are less frequent with a connection

    @property
    def is_relieved(self) -> bool:
        """Whether the chief's agent watches the other tasks on this agent's behalf and reports changes."""
        return self._link is not None and self.hub_is_current

    def _at_times(self, what: str, read: Callable[[], T]) -> T:
        """Read the folder, or return a value cached for at most `READ_S` if the hub would have reported a change."""
        at, value = self._read.get(what, (float("-inf"), None))
        now = time.monotonic()
        if not self.is_relieved or now - at >= READ_S:
            value = read()
            self._read[what] = (now, value)
        latest: T = value
        return latest

    @property
    def hub_is_current(self) -> bool:
        """Whether the hub is connected and knows the newest generation known to this agent."""
        return (side := self._side) is not None and side.fresh and side.news.number >= self._newest

    def _news(self) -> News:
        """Return the hub's last digest; empty if the hub is not connected or knows only an earlier generation."""
        return side.news if (side := self._side) and self.hub_is_current else News()

    @property
    def generation(self) -> int:
        """The current generation, counted from 0."""
        if begun := self._news().begun:
            self.folder.learn(begun)
            self._newest = max(self._newest, begun.generation)
        self._newest = max(self._newest, self._at_times("generation", lambda: self.folder.generation))
        if self._link:
            self._link.report(self._newest, self.folder.generation_record(self._newest), self._ended)
        return self._newest

    def generation_record(self, number: int) -> Generation | None:
        """Return the record of a generation; None without one. Looked up by name, since listings may lag behind."""
        if record := self.folder.generation_record(number):
            self._newest = max(self._newest, number)
        return record

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it continues. Once set, it never changes for this agent."""
        if self._ended is None:
            self._ended = self._news().outcome or self._at_times("outcome", lambda: self.folder.outcome)
        return self._ended

    @property
    def continues_elsewhere(self) -> bool:
        """Whether the run has stopped only to continue on another cluster or other nodes."""
        has_stopped = self.outcome is not None and self.outcome.state == OutcomeState.STOPPED
        request = self.folder.stop_request if has_stopped else None
        return request is not None and request.then != AfterStop.END

    def is_over(self, generation: int) -> bool:
        """Whether a generation is over: the run has an outcome, or a newer generation has begun."""
        return self.outcome is not None or self.generation > generation

    @property
    def stop_requested(self) -> bool:
        """Whether the tasks are to save and stop. A cached request is read again, since it can be withdrawn."""
        requested = bool(self._news().stop)
        if not requested and self._at_times("stop", lambda: self.folder.stop_requested):
            requested = self.folder.stop_requested
        self._stop_seen = (self._stop_seen or time.monotonic()) if requested else 0.0
        return requested

    @property
    def stop_s(self) -> float:
        """For how many seconds this agent has known the stop request; 0 without one."""
        return time.monotonic() - self._stop_seen if self._stop_seen else 0.0

    # Writes go to the folder at once and clear the cache. An older copy of a task writes nothing

    def require_newest(self) -> None:
        """Raise `Superseded` if a newer copy of the task has begun."""
        if self._copy:
            self._copy.require_newest()

    def _write(self, write: Callable[[], bool]) -> bool:
        self.require_newest()
        try:
            return write()
        finally:
            self._read.clear()

    def begin_generation(self, number: int, **why: Any) -> bool:
        """Begin a generation unless another task has or the run has ended; return whether this call did."""
        return self._write(lambda: self.folder.outcome is None and self.folder.begin_generation(number, **why))

    def end(self, state: str, **why: Any) -> bool:
        return self._write(lambda: self.folder.end(state, **why))

    def is_over_by_now(self, generation: int) -> bool:
        """Whether a generation is over, even if a network file system still hides a newer one."""
        self.folder.refresh_generations()
        self._read.clear()
        return self.is_over(generation)

    def request_stop(self, by: str, *, then: str = AfterStop.END) -> bool:
        return self._write(lambda: self.folder.request_stop(by, then=then))

    # The other tasks

    def heartbeat(self, task: str) -> Heartbeat | None:
        return (self._hub.beat(task) if self._hub else None) or self.folder.heartbeat(task)

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the newest heartbeat of every task, from the hub or the folder, where it may arrive first.

        Both are dated by the task's own clock.
        """
        beats = self.folder.heartbeats()
        if not self._hub:
            return beats
        return {
            name: max(self._hub.beat(name) or beat, beat, key=lambda each: each.updated_at)
            for name, beat in beats.items()
        }

    @property
    def newest_step(self) -> int:
        return max((beat.step for beat in self.heartbeats().values()), default=0)

    @property
    def unlinked(self) -> frozenset[str] | None:
        """The tasks without a connection to the hub, whose heartbeats in the folder count; None if all tasks' do."""
        return self._news().unlinked if self.is_relieved else None

    def is_connected(self, task: str) -> bool:
        """Return whether a task is known to be connected to the hub."""
        unlinked = self._news().unlinked
        return unlinked is not None and task not in unlinked

    # The rendezvous

    def join_rendezvous(self, number: int) -> None:
        """Report that this task is at the rendezvous of a generation and has made its connections."""
        if side := self._side:
            side.join_rendezvous(number)

    def absent(self, number: int) -> frozenset[str] | None:
        """Return the tasks that are not at the rendezvous of a generation yet; None if unknown or many."""
        news = self._news()
        return news.absent if news.number == number else None
