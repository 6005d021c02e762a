"""The run folder: its layout, what its heartbeats say, events, generations and summary.

Every task of a run shares this folder, and nothing else but the network. So each file has one writer at a time, is
replaced whole (a reader never sees half of one) or appended to in single writes, and a fact that several tasks may
claim at once (the next generation, the outcome) belongs to whoever creates its file first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import PrerequisiteError
from cluster.run import records
from cluster.run.fields import count, record
from cluster.spec import MAX_TASKS, ClusterSpec
from cluster.system.files import guard, make_folder, open_file, remove, rename
from cluster.system.journal import Journal, append_json, read_json_lines
from cluster.system.json_files import RESERVE, RESERVE_BYTES, create_json, write_json

LOST_AFTER_S = 15.0
"""Seconds without a new heartbeat, by the clock of whoever looks, after which a task counts as lost."""

FINAL_STATES = frozenset({"done", "failed", "stopped"})

SCALE = "scale"
"""What follows a stop that was asked for so that the run can go on at once on another cluster."""

SCALE_PATIENCE_S = 180.0
"""Longest time from such a request until the next generation: the bounds of its parts together are shorter."""

_TASK = re.compile(r"chief|evaluator|(worker|ps)-(0|[1-9][0-9]{0,8})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")


@dataclass(frozen=True)
class RunFolder:
    """Paths and records of one run."""

    path: Path
    _events: Journal = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        guard(self.path)
        object.__setattr__(self, "_events", Journal(self.events_log, records.event))

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved training configuration."""
        return self.path / "config.json"

    @property
    def cluster(self) -> Path:
        """The cluster's description."""
        return self.path / "cluster.json"

    @property
    def compose(self) -> Path:
        """How the tasks were started: the Compose overlay, or the list of local processes."""
        return self.path / "compose.json"

    @property
    def manifest(self) -> Path:
        """What the run was made of."""
        return self.path / "manifest.json"

    @property
    def environment(self) -> Path:
        """What the chief computed with."""
        return self.path / "environment.json"

    @property
    def summary(self) -> Path:
        """How the run ended; absent until then."""
        return self.path / "summary.json"

    @property
    def events_log(self) -> Path:
        """The run's life cycle, a JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The shared checkpoint folder."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The SavedModel written at the end."""
        return self.path / "export"

    @property
    def control(self) -> Path:
        """What the agents tell each other: generations, the request to stop, the outcome."""
        return self.path / "control"

    def status(self, task: str) -> Path:
        """The task's heartbeat."""
        return self.path / "status" / f"{task}.json"

    def metrics(self, task: str) -> Path:
        """The task's logged steps, a JSON object a line."""
        return self.path / "metrics" / f"{task}.jsonl"

    def losses(self, task: str = "chief") -> dict[int, float]:
        """Return the loss of every logged step; of one that was done again, the newest."""
        return {row["step"]: row["loss"] for row in self.rows(task) if row.get("loss") is not None}

    def rows(self, task: str) -> Iterator[dict[str, Any]]:
        """Yield the task's logged steps, as they were written."""
        for row in read_json_lines(self.metrics(task)):
            with contextlib.suppress(ValueError):
                yield records.row(row)

    def programs(self, task: str) -> Path:
        """What identifies the processes of the task's newest life, as the task itself sees them."""
        return self.control / "programs" / f"{task}.json"

    def log(self, task: str) -> Path:
        """What the task's program printed."""
        return self.path / "logs" / f"{task}.log"

    def work(self, task: str) -> Path:
        """The folder that the task's script runs in, where the run has one."""
        return self.path / "work" / task

    @property
    def scratch(self) -> Path:
        """What the containers of a script have for /tmp.

        Not in the run's folder: the engine follows links on the way to what it mounts, and there a task could lay one.
        """
        return self.path.parent / ".scratch" / self.name

    def tensorboard(self, task: str) -> Path:
        """The task's TensorBoard event files."""
        return self.path / "tensorboard" / task

    def ledger(self, generation: int) -> Path:
        """What the chief spent its time on in a generation."""
        return self.control / "lives" / f"{generation}.json"

    @property
    def trace_request(self) -> Path:
        """The request for a trace of a task's next steps; the task takes it away once it has answered."""
        return self.control / "trace.json"

    @property
    def trace_answer(self) -> Path:
        """What became of the newest request for a trace."""
        return self.control / "traced.json"

    def traces(self, task: str) -> list[Path]:
        """Return the folders of the task's traces, oldest first."""
        return sorted((self.tensorboard(task) / "plugins" / "profile").glob("*/"))

    def create(self) -> None:
        """Make the folder and its parts.

        Raises:
            PrerequisiteError: the folder cannot be written.
        """
        try:
            for part in ("status", "metrics", "logs", "tensorboard", "checkpoints", "control"):
                make_folder(self.path / part)
            with open_file(self.path / RESERVE, "wb") as file:
                file.write(bytes(RESERVE_BYTES))
        except OSError as error:
            if error.errno == errno.ELOOP:  # which no free space mends
                raise
            raise PrerequisiteError(
                f"run folder {self.path}: {error.strerror}; free the space or give write access, "
                "or set RUNS_DIR to a folder that can be written"
            ) from error

    def load_cluster(self) -> ClusterSpec:
        """Return the run's cluster.

        Raises:
            DamagedError: `cluster.json` describes none.
        """
        return records.read(self.cluster, records.cluster)

    def load_config(self) -> dict[str, Any]:
        """Return the run's configuration.

        Raises:
            DamagedError: `config.json` holds none.
        """
        return records.read(self.config, records.config)

    def load_started(self) -> dict[str, Any]:
        """Return how and when the run was started.

        Raises:
            DamagedError: `control/started.json` does not say it.
        """
        return records.read(self.control / "started.json", records.started)

    @property
    def started(self) -> dict[str, Any]:
        """What is known of how and when the run was started; empty where nothing is."""
        return records.read(self.control / "started.json", records.started, {})

    @property
    def composed(self) -> dict[str, Any]:
        """What `compose.json` says; empty where it says nothing."""
        return records.read(self.compose, records.compose, {})

    @property
    def script(self) -> dict[str, Any] | None:
        """The script that every task runs instead of the built-in trainer, and its arguments; None without one."""
        config = records.read(self.config, records.config, {})
        return config if "script" in config else None

    @property
    def result(self) -> dict[str, Any]:
        """What the chief's program reported at its end; nothing before."""
        return records.read(self.control / "result.json", records.result, {})

    @property
    def ended(self) -> dict[str, Any] | None:
        """The run's summary; None until there is one."""
        return records.read(self.summary, records.summary, None)

    # Heartbeats

    def heartbeats(self) -> dict[str, dict[str, Any]]:
        """Return the last heartbeat of every task that has one. `cluster/run/liveness.py` tells who is silent."""
        names = (path.stem for path in sorted((self.path / "status").glob("*.json")))
        beats = {name: beat for name in names if _TASK.fullmatch(name) and (beat := self.heartbeat(name))}
        return dict(list(beats.items())[: 3 * MAX_TASKS])

    def heartbeat(self, task: str) -> dict[str, Any] | None:
        """Return a task's last heartbeat; None where there is none yet, or a damaged one."""
        beat = records.read(self.status(task), records.heartbeat, None, limit=records.TASK_BYTES)
        return beat if beat and beat["task"] == task else None

    @property
    def newest_step(self) -> int:
        """The newest step that any task tells: servers count none of their own."""
        return max((beat["step"] for beat in self.heartbeats().values()), default=0)

    @property
    def saved_steps(self) -> list[int]:
        """The steps of the finished checkpoints, oldest first, whether or not their files are still good."""
        return sorted(int(name) for path in self.checkpoints.glob("ckpt-*.json") if (name := _number(path.stem[5:])))

    # Events

    def event(
        self, task: str, event: str, *, step: int | None = None, generation: int | None = None, **detail: Any
    ) -> None:
        """Append to the run's life cycle; `generation` is the newest where none is given.

        One write, so that lines of several tasks never mix.
        """
        line = {
            "time": time.time(),
            "task": task,
            "event": event,
            "generation": self.generation if generation is None else generation,
            "step": step,
            "detail": detail,
        }
        with contextlib.suppress(OSError):  # a full disk must not end the agent that tells of it
            append_json(self.events_log, line)

    def events(self) -> list[dict[str, Any]]:
        """Return the run's life cycle so far. Each call reads only what is new."""
        return self._events.read()

    # Generations

    @property
    def generation(self) -> int:
        """The gang's current life, counted from 0."""
        return next((number for number, _ in self._begun(newest_first=True)), 0)

    def generations(self) -> list[dict[str, Any]]:
        """Return why each generation was begun, oldest first."""
        return [why for _, why in self._begun()]

    def _begun(self, *, newest_first: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the generations and why they were begun. A file that does not say why has begun none."""
        folder = self.control / "generations"
        numbers = (int(path.stem) for path in folder.glob("*.json") if _NUMBER.fullmatch(path.stem))
        for number in sorted(numbers, reverse=newest_first):
            path = folder / f"{number}.json"
            if why := records.read(path, records.generation(number), None, limit=records.TASK_BYTES):
                yield number, why

    def begin_generation(self, number: int, **why: Any) -> bool:
        """Begin generation `number` unless another task already did; return whether this call did."""
        path = self.control / "generations" / f"{number}.json"
        return create_json(path, {"generation": number, "time": time.time(), **why}, records.generation(number))

    # The end

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How the run ended, as the first task that knew recorded it; None while it goes on."""
        return records.read(self.control / "outcome.json", records.outcome, None, limit=records.TASK_BYTES)

    def ledgers(self) -> list[dict[str, Any]]:
        """Return what the chief spent its time on in each generation that has such a record."""
        paths = sorted((self.control / "lives").glob("*.json"))
        found = (records.read(path, records.ledger, None, limit=records.TASK_BYTES) for path in paths)
        return [ledger for ledger in found if ledger]

    def end(self, state: str, **why: Any) -> bool:
        """Record the outcome unless another task already did; return whether this call did."""
        return create_json(self.control / "outcome.json", {"state": state, "time": time.time(), **why}, records.outcome)

    @property
    def stop_requested(self) -> bool:
        """Whether the tasks were asked to save and stop."""
        return self._stop_request is not None

    @property
    def _stop_request(self) -> dict[str, Any] | None:
        return records.read(self._stop, records.stop, None, limit=records.TASK_BYTES)

    @property
    def scale_requested(self) -> bool:
        """Whether that was for the sake of scaling the run, however long ago."""
        return (self._stop_request or {}).get("then") == SCALE

    def request_stop(self, by: str, *, then: str = "") -> bool:
        """Ask every task to save at the same step and stop, unless they were asked; return whether this call did.

        Args:
            by: who asks.
            then: `SCALE` where the run shall go on at once on another cluster; empty where nothing follows.
        """
        return create_json(self._stop, {"by": by, "then": then, "time": time.time()}, records.stop)

    def insist_on_stop(self, by: str) -> None:
        """Ask every task to save and stop for good, also where they were asked for the sake of scaling the run."""
        if not self.request_stop(by) and self.scale_requested:
            write_json(self._stop, {"by": by, "then": "", "time": time.time()})

    def withdraw_stop(self) -> None:
        """Let the run go on that was asked to stop: if its tasks stop all the same, they start again."""
        write_json(self._withdrawn, {"generation": self.generation})
        if not (taken := self._take_stop()).get("then", SCALE):
            self.request_stop(taken["by"])  # not the one that is withdrawn

    def stop_withdrawn(self, generation: int) -> bool:
        """Whether the tasks of this generation were asked to stop, but shall not any more."""
        withdrawn = records.read(self._withdrawn, record({"generation": count}), {})
        return not self.stop_requested and withdrawn.get("generation") == generation

    @property
    def scaling(self) -> bool:
        """Whether the run was asked to stop for another size, and that has not taken too long yet, by the clocks."""
        stop = self._stop_request or {}
        return bool(stop.get("then") == SCALE and abs(time.time() - stop["time"]) < SCALE_PATIENCE_S)

    @property
    def goes_on(self) -> bool:
        """Whether the run has stopped only to go on at once on another cluster: this is not its end."""
        outcome = self.outcome
        return outcome is not None and outcome["state"] == "stopped" and self.scale_requested

    def reopen(self) -> dict[str, Any]:
        """Clear the end of a run, so that it can go on in a new generation; return the request to stop that it had."""
        for path in (self.summary, *(self.control / f"{name}.json" for name in ("outcome", "result"))):
            remove(path)
        return self._take_stop()

    @property
    def _stop(self) -> Path:
        return self.control / "stop.json"

    @property
    def _withdrawn(self) -> Path:
        return self.control / "withdrawn.json"

    def _take_stop(self) -> dict[str, Any]:
        """Take the request to stop away; return it, empty where there was none: none is lost that nobody has read."""
        taken = self._stop.with_name(f".stop.{os.urandom(8).hex()}")
        try:
            rename(self._stop, taken.name)
        except FileNotFoundError:
            return {}
        value = records.read(taken, records.stop, {})
        remove(taken)
        return value


def _number(name: str) -> str:
    """Return a name that is a number as it was written by a program; empty for any other."""
    return name if _NUMBER.fullmatch(name) else ""
