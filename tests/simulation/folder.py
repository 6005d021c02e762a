"""The run folder of a simulated run, in memory: what `RunFolder` promises, and records that a crash leaves damaged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.contract.recovery.ends import End
from cluster.contract.recovery.step_record import RecordedStep
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import first_heartbeat
from cluster.contract.run.launch_records import Started
from cluster.contract.run.records import FINAL_STATES, Event, Generation, Heartbeat, Outcome, StopRequest
from cluster.contract.spec import ClusterSpec, Task
from tests.simulation.world import Now, SimTask, World

T = TypeVar("T")

MAX_RESTARTS = 3
HANG_TIMEOUT_S = 20.0
DAMAGED = object()
"""A record that a crash left empty: it does not count, and the next writer replaces it."""


class Cache:
    """What a host's client of a network file system remembers of the run folder.

    It asks the server about a file that it knows whenever that is opened, so contents are never old. But that a file
    does not exist, and which files a folder has, it may remember for up to a minute (`acdirmax` of nfs(5)). What is
    created on the host itself shows at once.
    """

    def __init__(self, world: World, longest_s: float) -> None:
        self._world, self._longest_s = world, longest_s
        self._absent: dict[str, float] = {}
        """Until when a file counts as one that does not exist."""
        self._listed: dict[str, tuple[float, frozenset[Any]]] = {}
        """Until when a folder counts as one with these files."""

    def hides(self, name: str, *, exists: bool) -> bool:
        """Whether a file does not exist, as the host sees it."""
        if exists or self._absent.get(name, 0.0) > self._world.now:
            return self._absent.get(name, 0.0) > self._world.now
        self._absent[name] = self._until()
        return True

    def listed(self, folder: str, names: Collection[T]) -> list[T]:
        """Return those files of a folder that the host sees, sorted."""
        until, known = self._listed.get(folder, (0.0, frozenset()))
        if until <= self._world.now:
            known = frozenset(names)
            self._listed[folder] = (self._until(), known)
        return sorted(known.intersection(names))

    def forget(self, name: str) -> None:
        """Look at the server for this file and its folder the next time."""
        self._absent.pop(name, None)
        self._listed.pop(name.partition("/")[0], None)

    def refresh(self, folder: str) -> None:
        """Look at the server for a folder and its files the next time."""
        self._listed.pop(folder, None)
        self._absent = {name: until for name, until in self._absent.items() if not name.startswith(f"{folder}/")}

    def elsewhere(self) -> Cache:
        return Cache(self._world, self._longest_s)

    def _until(self) -> float:
        return self._world.now + (self._world.random.uniform(0, self._longest_s) if self._longest_s else 0.0)


class SimFolder(RunFolder):
    """Everything that agents read and write there. Each access is an operation at which the agent may be killed."""

    def __init__(self, world: World, spec: ClusterSpec, *, script: bool) -> None:
        super().__init__(Path("/simulated/run"))
        for name, value in {
            "world": world,
            "spec": spec,
            "records": {"generations/0": {"generation": 0, "time": 1e9, "resumed": False}},
            "journal": [],
            "beats": {},
            "ends": {},
            "steps": {},
            "standby": {},
            "checkpoints_saved": [],
            "created_by": {},
            "torn_share": 0.0,
            "exclusive": True,
            "replaces_damaged": True,
            "how": {"max_restarts": MAX_RESTARTS, "hang_timeout_s": HANG_TIMEOUT_S},
            "runs_script": script,
            "cache": Cache(world, 0.0),
        }.items():
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        pass

    def seen_by(self, host: SimTask) -> SimFolder:
        """Return the folder as a host sees it."""
        seen = object.__new__(SimFolder)
        seen.__dict__ |= self.__dict__ | {"_begun": {}, "cache": host.cache}
        return seen

    def _create(self, name: str, value: dict[str, Any]) -> bool:
        self.world.operation(f"create {name}")
        self.cache.forget(name)
        missing = DAMAGED if self.replaces_damaged else None
        if self.exclusive and self.records.get(name, missing) is not missing:
            return False
        if self.world.running and self.world.random.random() < self.torn_share:
            self.records[name] = DAMAGED
            self.world.kill_running()
        self.records[name] = value
        self.created_by[name] = (self.world.running, self.world.running and self.world.running.thread)
        self.world.log(self.world.running.name if self.world.running else "-", f"{name}: {value}")
        self.world.operation(f"created {name}")
        return True

    def _record(self, name: str) -> Any:
        self.world.operation("read")
        value = self.records.get(name)
        return None if value is DAMAGED or self.cache.hides(name, exists=value is not None) else value

    def load_cluster(self) -> ClusterSpec:
        return self.spec

    @property
    def started(self) -> Started:
        return Started(**self.how)

    @property
    def script(self) -> dict[str, Any] | None:
        return {"script": "train.py"} if self.runs_script else None

    @property
    def generation(self) -> int:
        return max([each.generation for each in self.generations()], default=0)

    @property
    def newest_generation(self) -> int:
        """The generation, for code that is not an agent."""
        return max(self._numbers)

    @property
    def _numbers(self) -> list[int]:
        return [int(name[12:]) for name in self.records if name[:3] == "gen" and self.records[name] is not DAMAGED]

    def generations(self) -> list[Generation]:
        self.world.operation("read")
        numbers = {*self.cache.listed("generations", self._numbers), *self._begun}
        return [record for number in sorted(numbers) if (record := self.generation_record(number))]

    def generation_record(self, number: int) -> Generation | None:
        if number not in self._begun and (record := self._record(f"generations/{number}")):
            self._begun[number] = Generation.from_json(record)
        return self._begun.get(number)

    def refresh_generations(self) -> None:
        self.world.operation("refresh the generations")
        self.cache.refresh("generations")

    def begin_generation(self, number: int, **why: Any) -> bool:
        record = Generation(generation=number, time=self.world.time(), **why)
        return self._create(f"generations/{number}", record.to_json())

    @property
    def outcome(self) -> Outcome | None:
        record = self._record("outcome")
        return record and Outcome.from_json(record)

    def end(self, state: str, **why: Any) -> bool:
        return self._create("outcome", {"state": state, "time": self.world.time(), **why})

    @property
    def stop_request(self) -> StopRequest | None:
        record = self._record("stop")
        return record and StopRequest.from_json(record)

    def request_stop(self, by: str, *, then: str = "") -> bool:
        return self._create("stop", {"by": by, "then": then, "time": self.world.time()})

    def load_config(self) -> dict[str, Any]:
        return {"memory_snapshots": True}

    def stop_withdrawn(self, generation: int) -> bool:
        return False

    @property
    def saved_steps(self) -> list[int]:
        self.world.operation("read")
        return self.cache.listed("checkpoints", self.checkpoints_saved)

    def event(self, task: str, event: str, *, step: Any = None, generation: int | None = None, **detail: Any) -> None:
        self.world.operation(f"event {event}")
        number = self.newest_generation if generation is None else generation
        now = self.world.time()
        self.journal.append(Event(time=now, task=task, event=event, generation=number, step=step, detail=detail))
        self.world.log(task, f"event {event} in {number}: {detail.get('cause', '')}")

    def events(self) -> list[Event]:
        self.world.operation("read")
        return self.journal

    # Heartbeats. A live writer writes every second; that is worked out when somebody reads.

    def heartbeats(self) -> dict[str, Heartbeat]:
        return {name: beat for name in self.cache.listed("beats", self.beats) if (beat := self.heartbeat(name))}

    def heartbeat(self, task: str) -> Heartbeat | None:
        self.world.operation("read")
        beat = self.beats.get(task)
        return None if self.cache.hides(f"beats/{task}", exists=beat is not None) else beat.read()

    def died(self, task: str) -> None:
        """Note that the writer of a task's heartbeat is dead."""
        if beat := self.beats.get(task):
            beat.settle()


class Beat:
    def __init__(self, values: Heartbeat, skew_s: float, writes: Any) -> None:
        self.values, self.skew_s, self.writes = values, skew_s, writes
        self._last = int(Now.world.now)

    def read(self) -> Heartbeat:
        """Return the heartbeat as it was written last."""
        if self.writes is not None and self.writes():
            self._last = int(Now.world.now)
        return replace(self.values, updated_at=1e9 + self._last + self.skew_s)

    def settle(self) -> None:
        """Let nobody write it any more; its writer was alive until now."""
        self.read()
        self.writes = None

    def settle_at_death(self) -> None:
        """Let nobody write it any more: its writer has just died."""
        self._last = int(Now.world.now)
        self.writes = None


class SimHeartbeat:
    """Replaces `HeartbeatWriter` in an agent."""

    def __init__(self, run: SimFolder, task: Task, generation: int, restarts: int = 0) -> None:
        self._run, self._name = run, task.name
        self._owner = run.world.running
        self._beat: Beat | None = None
        self.current = first_heartbeat(task, generation, restarts)

    def start(self) -> SimHeartbeat:
        self.write()
        return self

    def update(self, **values: Any) -> None:
        self._run.world.operation("heartbeat")
        self.current = replace(self.current, **values)
        if self._beat and self._run.beats.get(self._name) is self._beat:
            self._beat.values = self.current
        elif values.get("state") in FINAL_STATES:
            self.write()

    def write(self) -> None:
        self._run.world.operation("heartbeat")
        if self._owner.superseded:
            return  # the newer copy writes it again within a second
        owner, world = self._owner, self._run.world
        incarnation = owner.thread
        self._beat = Beat(
            self.current,
            owner.skew_s,
            lambda: owner.alive and owner.thread is incarnation and owner.frozen_until <= world.now,
        )
        self._run.beats[self._name] = self._beat
        owner.cache.forget(f"beats/{self._name}")

    def hand_over(self) -> None:
        """Let the program write it once it does: it replaces the record."""

    def stop(self) -> None:
        self._run.world.operation("heartbeat")
        if self._beat:
            self._beat.settle()


def record_end(run: SimFolder, generation: int, end: End) -> None:
    run.world.operation("record an end")
    run.cache.forget(f"ends/{generation}-{end.task}")
    run.ends.setdefault((generation, end.task), end)
    run.world.log(end.task, f"end in {generation}: {end.kind}, {end.cause}")


def recorded_end(run: SimFolder, generation: int, task: str) -> End | None:
    run.world.operation("read")
    end = run.ends.get((generation, task))
    return None if run.cache.hides(f"ends/{generation}-{task}", exists=end is not None) else end


def ended_tasks(run: SimFolder, generation: int) -> frozenset[str]:
    return frozenset(end.task for end in recorded_ends(run, generation))


def recorded_ends(run: SimFolder, generation: int) -> list[End]:
    run.world.operation("read")
    seen = set(run.cache.listed("ends", run.ends.keys()))
    return [end for (number, task), end in run.ends.items() if number == generation and (number, task) in seen]


def read_progress(run: SimFolder, task: str) -> RecordedStep | None:
    run.world.operation("read")
    return run.steps.get(task)
