"""The run folder's records: heartbeats, events, generations, the outcome and stop requests.

The tasks of a run share only this folder and the network. Each file has one writer at a time and is either replaced
atomically, so that readers never see a part of it, or appended to line by line. A record that several tasks may try to
write at once (the next generation, the outcome) belongs to the task that creates its file.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.contract.run import launch_records, records
from cluster.contract.run.launch_records import Started, TensorBoardRecord
from cluster.contract.run.layout import Paths
from cluster.contract.run.records import (
    AfterStop,
    Event,
    Generation,
    Heartbeat,
    Outcome,
    RunResult,
    StopRequest,
    Summary,
    TimeLedger,
)
from cluster.contract.schema import Count, Record
from cluster.contract.spec import MAX_TASKS, ClusterSpec
from cluster.system import json_files
from cluster.system.errors import PrerequisiteError
from cluster.system.files import guard, make_folder, open_file, remove, rename
from cluster.system.json_files import REQUIRED, Journal, create_json, write_json

LOST_AFTER_S = 15.0
"""Seconds without a new heartbeat, by the watcher's clock, after which a task counts as lost."""

TASK_LOST = "the loss of a task"
"""The `by` of a request to queue a job again because a task is lost; the scheduler may notice only minutes later."""

SCALE_PATIENCE_S = 180.0
"""Longest time without a heartbeat while `invoke scale` swaps the tasks, if the command is alive. The timeouts of its
steps are shorter in total."""

_TASK = re.compile(r"chief|evaluator|(worker|ps)-(0|[1-9][0-9]{0,8})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")


class _Withdrawn(Record):
    generation: Count


@dataclass(frozen=True)
class RunFolder(Paths):
    """One run. Inherited attributes are paths; `load_` methods and the other properties return the contents."""

    _events: Journal[Event] = field(init=False, compare=False, repr=False)
    _begun: dict[int, Generation] = field(init=False, compare=False, repr=False, default_factory=dict)
    """Cache of the generations that were read or learned, whose records never change."""

    def __post_init__(self) -> None:
        guard(self.path)
        object.__setattr__(self, "_events", Journal(self.events_log, Event.from_json))

    @property
    def incomplete(self) -> bool:
        """Whether the folder is not a complete run: a command is creating or deleting it, or was killed doing so."""
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        return self.unfinished.exists() or not any(self.path.iterdir())

    def delete(self) -> None:
        """Delete the run and its temporary files. If this fails or is interrupted, the folder is left incomplete."""
        if self.path.exists():
            self.unfinished.touch()
            remove(self.cluster)
            for path in set(self.path.iterdir()) - {self.unfinished}:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    remove(path)
            shutil.rmtree(self.path)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def create(self) -> None:
        """Create the folder and its subfolders; raise PrerequisiteError if that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for part in ("status", "metrics", "logs", "tensorboard", "checkpoints", "control"):
                make_folder(self.path / part)
            with open_file(self.path / json_files.RESERVE, "wb") as file:
                file.write(bytes(json_files.RESERVE_BYTES))
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link, which the advice below would not fix
                raise
            fix = "free the space or give write access, or set RUNS_DIR to a folder that can be written"
            raise PrerequisiteError(f"run folder {self.path}: {error.strerror}; {fix}") from error

    def load_cluster(self) -> ClusterSpec:
        """Return the run's cluster; raise DamagedError without a valid one."""
        return records.read_record(self.cluster, launch_records.cluster)

    def load_config(self, default: Any = REQUIRED) -> dict[str, Any]:
        """Return the run's configuration, or the default; raise DamagedError without a valid one or a default."""
        return records.read_record(self.config, launch_records.config, default)

    def load_manifest(self, default: Any = REQUIRED) -> dict[str, Any]:
        """Return the run's manifest, or the default; raise DamagedError without a valid one or a default."""
        return records.read_record(self.manifest, launch_records.manifest, default)

    def load_started(self) -> Started:
        """Return how and when the run was started; raise DamagedError without a valid record."""
        return records.read_record(self.control / "started.json", Started.from_json)

    @property
    def started(self) -> Started:
        """How and when the run was started; an empty record if unknown."""
        return records.read_record(self.control / "started.json", Started.from_json, Started())

    @property
    def composed(self) -> dict[str, Any]:
        """The content of `compose.json`; empty without a valid one."""
        return records.read_record(self.compose, launch_records.compose, {})

    @property
    def script(self) -> dict[str, Any] | None:
        """The script that every task runs instead of the training program, with its arguments; None without one."""
        config = self.load_config({})
        return config if "script" in config else None

    @property
    def result(self) -> RunResult:
        """The result that the chief's program reported at its end; empty before the end."""
        return records.read_record(self.control / "result.json", RunResult.from_json, RunResult())

    @property
    def board_port(self) -> int | None:
        """The port of the run's TensorBoard; 0 if none was requested, None without a record."""
        board = records.read_record(self.board, TensorBoardRecord.from_json, None)
        return board.port if board else None

    def load_summary(self) -> Summary | None:
        """Return the run's summary; None before the end of the run."""
        return records.read_record(self.summary, Summary.from_json, None)

    # Heartbeats and metrics

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the newest heartbeat of every task; `cluster/contract/run/heartbeat.py` determines silent tasks."""
        names = (path.stem for path in sorted((self.path / "status").glob("*.json")))
        beats = {name: beat for name in names if _TASK.fullmatch(name) and (beat := self.heartbeat(name))}
        return dict(list(beats.items())[: 3 * MAX_TASKS])

    def heartbeat(self, task: str) -> Heartbeat | None:
        """Return a task's newest heartbeat; None without a valid one."""
        beat = records.read_record(self.status(task), Heartbeat.from_json, None, limit=records.TASK_BYTES)
        return beat if beat and beat.task == task else None

    @property
    def newest_step(self) -> int:
        """The newest step that any task reports; parameter servers report none."""
        return max((beat.step for beat in self.heartbeats().values()), default=0)

    @property
    def saved_steps(self) -> list[int]:
        """The steps of the finished checkpoints, oldest first, intact or damaged."""
        names = (path.stem.removeprefix("ckpt-") for path in self.checkpoints.glob("ckpt-*.json"))
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def losses(self, task: str = "chief") -> dict[int, float]:
        """Return the loss of every logged step; for a repeated step, the latest."""
        return {row["step"]: row["loss"] for row in self.rows(task) if row.get("loss") is not None}

    def rows(self, task: str) -> Iterator[dict[str, Any]]:
        """Yield the task's logged steps in the order of writing."""
        for row in json_files.read_json_lines(self.metrics(task)):
            with contextlib.suppress(ValueError):
                yield records.row(row)

    # Events

    def event(
        self, task: str, event: str, *, step: int | None = None, generation: int | None = None, **detail: Any
    ) -> None:
        """Append an event to the run's log of events; `generation` defaults to the current one."""
        number = self.generation if generation is None else generation
        line = Event(time=time.time(), task=task, event=event, generation=number, step=step, detail=detail)
        with contextlib.suppress(OSError):  # a full disk must not end the agent
            json_files.append_json(self.events_log, line.to_json())

    def events(self) -> list[Event]:
        """Return the run's events so far. Each call reads only new lines of the log."""
        return self._events.read()

    # Generations

    @property
    def generation(self) -> int:
        """The current generation, counted from 0."""
        return next((number for number in reversed(self._numbers()) if self.generation_record(number)), 0)

    def generations(self) -> list[Generation]:
        """Return the records of all generations, oldest first."""
        return [record for number in self._numbers() if (record := self.generation_record(number))]

    def _numbers(self) -> list[int]:
        """Return the numbers of all generations, oldest first, including those whose records are invalid."""
        names = (path.stem for path in (self.control / "generations").glob("*.json"))
        return sorted({int(name) for name in names if _NUMBER.fullmatch(name)} | self._begun.keys())

    def generation_record(self, number: int) -> Generation | None:
        """Return the record of a generation; None without one."""
        if number not in self._begun:
            path = self.control / "generations" / f"{number}.json"
            if record := records.read_record(path, records.generation(number), None, limit=records.TASK_BYTES):
                self._begun[number] = record
        return self._begun.get(number)

    def learn(self, record: Generation) -> None:
        """Add another task's copy of a generation's record, which a network file system may show late."""
        self._begun.setdefault(record.generation, record)

    def refresh_generations(self) -> None:
        """Refresh the listing of the folder of generations, by creating and removing a file there.

        The server's reply tells the client of a network file system that others have changed the folder since it was
        cached, see `change_info4` in RFC 7530.
        """
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=self.control / "generations"):
            pass

    def begin_generation(self, number: int, **why: Any) -> bool:
        """Begin generation `number` unless another task has; return whether this call did."""
        path = self.control / "generations" / f"{number}.json"
        record = Generation(generation=number, time=time.time(), **why)
        return create_json(path, record.to_json(), records.generation(number))

    # The end

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, according to the first task that recorded it; None while the run continues."""
        path = self.control / "outcome.json"
        if not os.path.lexists(path):  # agents check ten times a second
            return None
        return records.read_record(path, Outcome.from_json, None, limit=records.TASK_BYTES)

    def ledgers(self) -> list[TimeLedger]:
        """Return the chief's time ledgers, one per generation, oldest first."""
        paths = (self.control / "ledgers").glob("*.json")
        ledgers = (records.read_record(path, TimeLedger.from_json, None, limit=records.TASK_BYTES) for path in paths)
        return sorted((ledger for ledger in ledgers if ledger), key=lambda ledger: ledger.generation)

    def end(self, state: str, **why: Any) -> bool:
        """Record the outcome unless another task has; return whether this call did."""
        outcome = Outcome(state=records.OutcomeState(state), time=time.time(), **why)
        return create_json(self.control / "outcome.json", outcome.to_json(), Outcome.from_json)

    @property
    def stop_requested(self) -> bool:
        """Whether the tasks are to save and stop."""
        return self.stop_request is not None

    @property
    def stop_request(self) -> StopRequest | None:
        """The request to save and stop; None without one."""
        if not os.path.lexists(self.stop):
            return None
        return records.read_record(self.stop, StopRequest.from_json, None, limit=records.TASK_BYTES)

    @property
    def after_stop(self) -> AfterStop | None:
        """The purpose of the stop request, pending or carried out; None without a request."""
        request = self.stop_request
        return request.then if request else None

    def request_stop(self, by: str, *, then: str = AfterStop.END) -> bool:
        """Request that every task saves at the same step and stops; return False if there is a request already."""
        return create_json(self.stop, _stop(by, then), StopRequest.from_json)

    def insist_on_stop(self, by: str) -> None:
        """Request that every task saves and stops for good, overriding a request after which the run would continue."""
        if not self.request_stop(by) and self.after_stop not in (None, AfterStop.END):
            write_json(self.stop, _stop(by))

    def withdraw_stop(self) -> None:
        """Withdraw the stop request. Tasks that have already acted on it restart."""
        write_json(self.withdrawn_stop, {"generation": self.generation})
        if (taken := self._take_stop()) and taken.then == AfterStop.END:
            self.request_stop(taken.by)  # a final request, which has overridden the withdrawn one

    def stop_withdrawn(self, generation: int) -> bool:
        """Whether a stop request was withdrawn in this generation, and none has replaced it."""
        withdrawn = records.read_record(self.withdrawn_stop, _Withdrawn.from_json, None)
        return not self.stop_requested and withdrawn is not None and withdrawn.generation == generation

    @property
    def continues_elsewhere(self) -> bool:
        """Whether the run has stopped only to continue on another cluster or other nodes."""
        return self.has_stopped and self.after_stop not in (None, AfterStop.END)

    @property
    def has_stopped(self) -> bool:
        """Whether the run has ended because a stop was requested."""
        outcome = self.outcome
        return outcome is not None and outcome.state == records.OutcomeState.STOPPED

    def reopen(self) -> StopRequest | None:
        """Remove the outcome, so that the run can continue in a new generation; return the stop request.

        The token is removed first: the folder may be a copy, whose agents must not connect to those of the original.
        """
        ends = (self.control / "outcome.json", self.control / "result.json")
        for path in (self.token, self.gang, self.summary, self.card, *ends):
            remove(path)
        return self._take_stop()

    def _take_stop(self) -> StopRequest | None:
        """Remove the stop request and return it. It is renamed first, so as not to lose a concurrent request."""
        taken = self.stop.with_name(f".stop.{os.urandom(8).hex()}")
        try:
            rename(self.stop, taken.name)
        except FileNotFoundError:
            return None
        value = records.read_record(taken, StopRequest.from_json, None)
        remove(taken)
        return value


def _stop(by: str, then: str = AfterStop.END) -> dict[str, Any]:
    return StopRequest(by=by, then=AfterStop(then), time=time.time()).to_json()
