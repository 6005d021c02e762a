"""A deterministic machine for real agents: one clock, one schedule, one thread that runs at a time.

Every agent runs its own code, `cluster.agent.agent.Agent`, in a separate thread. It gives up control only where it
waits or uses the run folder, and the order in which agents get it back is drawn from a seed. So a schedule can be
repeated exactly, an hour of waiting takes milliseconds, and an agent can be killed between any two of its operations.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.agent.schedulers.lifecycle import COPY_S
from cluster.contract.run.joining import Superseded
from cluster.contract.spec import ClusterSpec, Task

HURRY_S = 1.0
"""Waits shorter than this are polls: they take up to three times as long, as on a busy machine."""


class Killed(BaseException):
    """Unwinds the thread of an agent that was killed. Nothing that it does until then has an effect."""


class Broken(AssertionError):
    """An invariant does not hold."""


def _held() -> threading.Lock:
    """Return a lock that is held: a thread that acquires it waits until another thread releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class SimTask:
    """One task: its agent's thread, and what the engine does when that ends."""

    def __init__(self, world: World, task: Task) -> None:
        self.world, self.task, self.name = world, task, task.name
        self.thread: threading.Thread | None = None
        self.baton = _held()
        self.skew_s = 0.0
        """How much its wall clock is ahead."""
        self.alive = False
        self.ended = False
        """Whether its agent ended by itself: the engine does not start it again."""
        self.started_at = 0.0
        self.frozen_until = 0.0
        self.lost = False
        """Whether the engine cannot start it again: its machine is gone."""
        self.superseded = False
        """Whether the engine has started another copy of it elsewhere."""
        self.operations = 0
        self.crash_at: set[int] = set()
        """Numbers of the operations at which the whole task is killed."""
        self.programs: list[Any] = []
        self.agent: Any = None
        self.cache: Any = None
        """What its host remembers of the run folder."""
        self._waiting = 0

    @property
    def gone(self) -> bool:
        """Whether nothing will bring it back: its machine is lost, or it is frozen permanently."""
        return self.lost or self.frozen_until > World.LIMIT_S

    @property
    def programs_in_use(self) -> list[Any]:
        """Its programs that are alive and no standby processes."""
        return [program for program in self.programs if program.code is None and not program.standby]

    def start(self) -> None:
        if self.lost or self.alive or self.ended or self.superseded:
            return
        self.alive, self.started_at = True, self.world.now
        self.baton = _held()
        self.thread = threading.Thread(target=self._main, args=(self.baton,), daemon=True)
        self.thread.start()
        self.world.resume(self)

    def _main(self, baton: threading.Lock) -> None:
        baton.acquire()
        try:
            self.agent = self.world.make_agent(self)
            self.agent.main()
            self.alive, self.ended = False, True
            self.world.log(self.name, "agent ended")
        except Killed:
            pass
        except Superseded:
            self.alive = False
            self.world.log(self.name, "older copy ended by itself")
            for program in self.programs:
                program.exit(-9)
        except BaseException as error:  # the schedule fails with it
            self.world.error = self.world.error or error
            self.alive = False
        finally:
            self.world.scheduler.release()

    def kill(self, again_s: float | None) -> None:
        """Kill the agent and, since the kernel does so, its programs; start it again after a while."""
        if not self.alive:
            return
        self.alive, self.frozen_until = False, 0.0
        self.world.log(self.name, "older copy ended" if self.superseded else "task killed")
        if not self.superseded:
            self.world.folder.died(self.name)
            self.world.meetings.pop(self.name, None)
            self.world.waiting.pop(self.name, None)
        for program in self.programs:
            program.exit(-9)
        if self.world.running is not self:  # let its thread unwind
            self.world.resume(self)
        if again_s is None:
            self.lost = True
        else:
            self.world.at(again_s, self.start)

    def wait(self, seconds: float) -> None:
        """Give up control for a while; a program's end wakes the agent earlier."""
        self._waiting += 1
        turn = self._waiting
        self.world.at(seconds, lambda: self._continue(turn))
        self.world.scheduler.release()
        self.baton.acquire()
        self._waiting += 1
        if not self.alive:
            raise Killed

    def wake(self) -> None:
        """Let a waiting agent continue soon."""
        turn = self._waiting
        self.world.at(self.world.random.uniform(0, 0.02), lambda: self._continue(turn))

    def _continue(self, turn: int) -> None:
        if turn != self._waiting or not self.alive:
            return
        if self.frozen_until > self.world.now:
            self.world.at(self.frozen_until - self.world.now, lambda: self._continue(turn))
        else:
            self.world.resume(self)


class World:
    """One schedule: tasks, their clock, what happens when."""

    LIMIT_S = 20_000.0
    MOST_EVENTS = 2_000_000
    """More of them mean that time stands still."""

    def __init__(self, spec: ClusterSpec, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.scheduler = _held()
        self.running: SimTask | None = None
        self.error: BaseException | None = None
        self.trace: list[tuple[float, str, str]] = []
        self.tasks = {task.name: SimTask(self, task) for task in spec.tasks}
        self.older: list[SimTask] = []
        """Copies of tasks that the engine has started again elsewhere."""
        self.copied = False
        """Whether the engine may do that, so that agents look for newer copies."""
        self.meetings: dict[str, Any] = {}
        """The rendezvous in which each task is."""
        self.waiting: dict[str, str] = {}
        """The tasks that were left out and answer greetings, with their token."""
        self.linked = False
        """Whether agents have connections."""
        self.hub: Any = None
        self.links: dict[str, Any] = {}
        """The newest connection of each task."""
        self.cuts: dict[str, float] = {}
        """Until when each task's connection is cut."""
        self.folder: Any = None
        self.training: Any = None
        self.pids: list[Any] = []
        """The programs, by process id less one."""
        self.make_agent: Callable[[SimTask], Any]
        self.yield_share = 0.05
        """How often an agent loses control at an operation on the folder."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def log(self, task: str, what: str) -> None:
        self.trace.append((round(self.now, 2), task, what))

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), action))

    def start_copy(self, name: str) -> None:
        """Start a task elsewhere, as a scheduler that lost sight of its host; the first copy may continue."""
        older = self.tasks[name]
        if older.ended or older.lost:
            return
        older.superseded = True
        self.older.append(older)
        self.training.superseded(older)
        self.meetings.pop(name, None)  # others reach the new one
        self.waiting.pop(name, None)
        newer = self.tasks[name] = SimTask(self, older.task)
        newer.cache, newer.skew_s = older.cache.elsewhere(), older.skew_s
        self.log(name, "another copy started")
        newer.start()
        self._fence(older)

    def _fence(self, older: SimTask) -> None:
        """End an older copy as `lifecycle.run_agent` does: soon after its host continues."""
        wait_s = older.frozen_until - self.now

        def end() -> None:
            if older.frozen_until > self.now:
                self._fence(older)
            else:
                self.fence(older)

        self.at(max(wait_s, 0.0) + self.random.uniform(0, COPY_S), end)

    def fence(self, older: SimTask) -> None:
        older.kill(None)

    def is_cut(self, name: str) -> bool:
        return self.cuts.get(name, 0.0) > self.now

    def resume(self, task: SimTask) -> None:
        """Let an agent run until it waits."""
        before, self.running = self.running, task
        task.baton.release()
        self.scheduler.acquire()
        self.running = before
        if self.error:
            raise self.error

    def operation(self, name: str) -> None:
        """Count an operation of the running agent on what it shares with others; it may be killed here, or delayed."""
        task = self.running
        if task is None:
            return
        if not task.alive:
            raise Killed
        task.operations += 1
        if task.operations in task.crash_at:
            self.log(task.name, f"killed at operation {task.operations}: {name}")
            self.kill_running()
        if self.random.random() < self.yield_share:
            task.wait(self.random.uniform(0, 0.3))

    def kill_running(self) -> None:
        task = self.running
        assert task
        task.kill(self.random.uniform(0.1, 3))
        raise Killed

    def run(self, over: Callable[[], bool]) -> None:
        """Run the schedule until it is over."""
        done = 0
        try:
            while not over():
                done += 1
                if not self._events or self.now > self.LIMIT_S or done > self.MOST_EVENTS:
                    raise Broken("end: the run does not end")
                self.now, _, action = heapq.heappop(self._events)
                action()
        finally:
            for task in [*self.tasks.values(), *self.older]:
                if task.alive:
                    task.alive = False
                    self.running = task
                    task.baton.release()
                    self.scheduler.acquire()

    # The clock, as agents see it

    def time(self) -> float:
        return 1e9 + self.now + (self.running.skew_s if self.running else 0.0)

    def sleep(self, seconds: float) -> None:
        assert self.running
        busy = self.random.uniform(1, 3) if seconds < HURRY_S else 1.0
        self.running.wait(seconds * busy)


class Now:
    """The world whose schedule runs; what replaces modules and functions finds it here."""

    world: World

    @classmethod
    @contextmanager
    def of(cls, world: World) -> Iterator[None]:
        cls.world = world
        try:
            yield
        finally:
            del cls.world
