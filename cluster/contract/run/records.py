"""The records of a run in progress, checked when they are read: tasks can write anything there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

from cluster.contract.schema import (
    SPARSE,
    Count,
    ExitCode,
    Measured,
    Number,
    Record,
    Seconds,
    Step,
    count,
    dictionary,
    listing,
    mapping,
    one_of,
    text,
)
from cluster.contract.spec import MAX_DEVICES, MAX_TASKS, ClusterSpec, Role, Task
from cluster.contract.strategies import STRATEGIES
from cluster.system.json_files import RECORD_BYTES, DamagedError, read_json, warn_once

EVALUATED = "eval_"
"""The prefix of the metrics of evaluations."""
TASK_BYTES = 2**20
"""The largest record that a task writes often."""

_NEEDED: Any = object()

T = TypeVar("T")
D = TypeVar("D")


@overload
def read(path: Path, check: Callable[[Any], T], *, limit: int = RECORD_BYTES) -> T: ...


@overload
def read(path: Path, check: Callable[[Any], T], default: D, *, limit: int = RECORD_BYTES) -> T | D: ...


def read(path: Path, check: Callable[[Any], Any], default: Any = _NEEDED, *, limit: int = RECORD_BYTES) -> Any:
    """Read a record through its check.

    Args:
        path: the record.
        check: returns the checked record, such as `Heartbeat.from_json`.
        default: returned without a valid record; if it is not given, there has to be one.
        limit: the largest record that is read, in bytes.

    Raises:
        DamagedError: there is neither a valid record nor a default.
    """
    try:
        return check(read_json(path, limit=limit))
    except FileNotFoundError:
        damaged = DamagedError(path, "it is missing")
        if default is not _NEEDED:
            return default
    except DamagedError as error:
        damaged = error
    except ValueError as error:
        damaged = DamagedError(path, str(error))
    if default is _NEEDED:
        raise damaged
    warn_once(damaged)
    return default


class TaskState(StrEnum):
    """The states of a task, in the order in which an attempt passes through them.

        starting -> waiting -> compiling -> training -> done, stopped or failed
                                            training <-> saving, evaluating

    `restarting` is the pause before the next attempt; watchers replace the state of a silent task by `lost`.
    """

    STARTING = "starting"
    WAITING = "waiting"
    COMPILING = "compiling"
    TRAINING = "training"
    SAVING = "saving"
    EVALUATING = "evaluating"
    RESTARTING = "restarting"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


FINAL_STATES = frozenset({TaskState.DONE, TaskState.FAILED, TaskState.STOPPED})


@dataclass(frozen=True, kw_only=True)
class Pace(Record):
    """How long the steps of a task take, and for which share of that it waits for input or is busy."""

    steps: Count = 0
    step_ms: dict[str, Measured] | None = None
    input_share: Measured = None
    busy_share: Measured = None


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Record):
    """The state of a task, its step and speed: `status/<task>.json`."""

    task: str
    role: str = ""
    state: TaskState
    generation: Count = 0
    step: Count = 0
    steps_total: Count | None = field(default=None, metadata=SPARSE)
    examples_per_s: Measured = None
    loss: Measured = None
    restarts: Count = 0
    step_ms: dict[str, Measured] | None = None
    input_share: Measured = None
    busy_share: Measured = None
    pace: Pace | None = None
    """All steps of the generation; the three fields before are about the newest steps."""
    exit_code: ExitCode | None = field(default=None, metadata=SPARSE)
    obstacle: str | None = field(default=None, metadata=SPARSE)
    """The reason why the task cannot listen on its port."""
    importing: bool = field(default=False, metadata=SPARSE)
    """Whether its process imports the libraries of the program."""
    ended: bool = field(default=False, metadata=SPARSE)
    """Whether this is the last heartbeat of the task's agent."""
    updated_at: Seconds

    @property
    def recent_pace(self) -> Pace:
        """The pace of the newest steps."""
        return Pace(
            steps=self.pace.steps if self.pace else 0,
            step_ms=self.step_ms,
            input_share=self.input_share,
            busy_share=self.busy_share,
        )


class OutcomeState(StrEnum):
    """The ways in which a run ends."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """How the run ended, and the task at fault: `control/outcome.json`."""

    state: OutcomeState
    time: Seconds
    task: str | None = field(default=None, metadata=SPARSE)
    exit_code: ExitCode | None = field(default=None, metadata=SPARSE)
    step: Count | None = field(default=None, metadata=SPARSE)
    error: str | None = field(default=None, metadata=SPARSE)


class AfterStop(StrEnum):
    """What follows a requested stop."""

    END = ""
    SCALE = "scale"
    """The run continues at once on another cluster."""
    REQUEUE = "requeue"
    """The run's job frees its nodes; the run continues once the job has nodes again."""


@dataclass(frozen=True, kw_only=True)
class StopRequest(Record):
    """A request that every task saves at the same step and stops: `control/stop.json`."""

    by: str
    then: AfterStop = AfterStop.END
    time: Seconds = 0.0


@dataclass(frozen=True)
class EndedAttempt(Record):
    """How one attempt ended."""

    kind: str = field(default="external", metadata=SPARSE)
    last_step: Step = field(default=-1, metadata=SPARSE)
    """The steps that the task at fault had done; -1: none."""
    saved: Step = field(default=-1, metadata=SPARSE)
    """The step of the newest checkpoint at that time."""
    runtime_s: Seconds = field(default=0.0, metadata=SPARSE)
    """How long a script ran; 0 for programs that report steps."""


@dataclass(frozen=True, kw_only=True)
class _Detail(EndedAttempt):
    cause: str | None = field(default=None, metadata=SPARSE)
    error: str | None = field(default=None, metadata=SPARSE)
    failed_at: Seconds = field(default=0.0, metadata=SPARSE)
    exit_code: ExitCode | None = field(default=None, metadata=SPARSE)
    pause_s: Seconds = field(default=0.0, metadata=SPARSE)
    single_steps_from: Count = field(default=0, metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """A line of `events.jsonl`."""

    time: Seconds
    task: str
    event: str
    generation: Count = 0
    step: Count | None = None
    detail: Annotated[dict[str, Any], dictionary(_Detail)] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Row(Record):
    step: Count
    time: Seconds = 0.0
    loss: Measured = field(default=None, metadata=SPARSE)
    examples_per_s: Measured = None


row = dictionary(_Row)
"""A line of a task's metrics: a logged step, with metrics of any name."""


@dataclass(frozen=True, kw_only=True)
class Generation(EndedAttempt):
    """A start of the cluster and the attempt before it: `control/generations/<generation>.json`.

    Without a task, `up` or `scale` began it.
    """

    generation: Count
    time: Seconds
    resumed: bool = field(default=False, metadata=SPARSE)
    task: str | None = field(default=None, metadata=SPARSE)
    """The task whose failure or return began it."""
    cause: str = field(default="", metadata=SPARSE)
    error: str | None = field(default=None, metadata=SPARSE)
    step: Count = field(default=0, metadata=SPARSE)
    """The newest step of any task at that time."""
    failed_at: Seconds | None = field(default=None, metadata=SPARSE)
    pause_s: Seconds = field(default=0.0, metadata=SPARSE)
    single_steps_from: Count | None = field(default=None, metadata=SPARSE)
    """The step from which it runs single steps."""
    left_out: frozenset[str] = field(default=frozenset(), metadata=SPARSE)
    standby_ports: Count | None = field(default=None, metadata=SPARSE)
    """The set of ports, 0 or 1, of the cluster of standby processes that it begins with."""

    @property
    def failure_time(self) -> float:
        """The time of the failure, or of the start without one."""
        return self.time if self.failed_at is None else self.failed_at


def generation(number: int) -> Callable[[Any], Generation]:
    """Return a check for the record of generation `number`."""

    def checked(value: Any) -> Generation:
        record = Generation.from_json(value)
        if record.generation != number:
            raise ValueError(f"generation: expected {number}")
        return record

    return checked


@dataclass(frozen=True, kw_only=True)
class Place(Record):
    """The node and address of a task of a job, and the job's number."""

    node: str
    host: str
    port: Count
    job: str = ""


@dataclass(frozen=True, kw_only=True)
class Activity(Record):
    """The seconds of the chief's steps, for input and computing, and of what it did between them."""

    input: Seconds
    compute: Seconds
    save: Seconds
    evaluate: Seconds


@dataclass(frozen=True, kw_only=True)
class Ledger(Record):
    """The chief's time in one generation: `control/ledgers/<generation>.json`."""

    generation: Count
    began: Seconds
    first_step_at: Seconds | None
    first: Count
    """The steps before this generation."""
    updated_at: Seconds
    step: Count
    timed_steps: Count
    seconds: Activity
    saves: dict[str, Measured] = field(default_factory=dict)
    """The interval between checkpoints, and the measurements that it follows from."""


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """The result that the chief's program reports at its end: `control/result.json`."""

    steps: Count | None = None
    epochs: Measured = None
    examples_per_s: Measured = None
    metrics: dict[str, Measured] = field(default_factory=dict)
    weights_sha256: str | None = None
    keras: str | None = None
    """The version of Keras."""


@dataclass(frozen=True, kw_only=True)
class Restart(Record):
    """The cost of one restart."""

    generation: Count = 0
    task: str = ""
    cause: str = ""
    detected_s: Measured = None
    resumed_s: Measured = None
    """Seconds from the failure to the next new step; a script reports no steps."""
    script_started_s: Measured = field(default=None, metadata=SPARSE)
    """Seconds from the failure until the process of a script started again."""
    steps_lost: Count | None = None


@dataclass(frozen=True)
class Straggler(Record):
    """A task that all others wait for."""

    task: str
    slower: Number
    """How many times as long it is busy as the median of the others."""
    input_part: Number
    """The part of the difference that is waiting for input."""

    def __str__(self) -> str:
        return f"{self.task} is {self.slower:.1f}x slower, {self.input_part:.0%} of it in input".replace("%", " %")


@dataclass(frozen=True)
class Starved(Record):
    """A task that waits for its input."""

    task: str
    input_share: Number
    """The share of the time of its steps."""

    def __str__(self) -> str:
        return f"{self.task} waits {self.input_share:.0%} of the time for input".replace("%", " %")


@dataclass(frozen=True, kw_only=True)
class Paces(Record):
    """The pace of each task, and the tasks that are slower than the others or wait for input."""

    tasks: dict[str, Pace] | None = field(default=None, metadata=SPARSE)
    stragglers: tuple[Straggler, ...] = ()
    starved: tuple[Starved, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cause(Record):
    """The failure that ended a run."""

    task: str | None = None
    exit_code: ExitCode | None = None
    step: Count | None = None
    error: str | None = None
    time: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class MembershipChange(Record):
    """A generation with other tasks than the one before, and its first step."""

    generation: Count
    step: Count
    lost: tuple[str, ...]
    regained: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"without {', '.join(self.lost)}"] if self.lost else []
        parts += [f"with {', '.join(self.regained)} again"] if self.regained else []
        return f"{' and '.join(parts)} from step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Summary(Record):
    """How a run ended: `summary.json`."""

    state: OutcomeState
    strategy: str = ""
    replicas: Count = 0
    steps: Count = 0
    epochs: Measured = None
    startup_s: Measured = None
    wall_s: Seconds = 0.0
    examples_per_s: Measured = None
    metrics: dict[str, Measured] = field(default_factory=dict)
    weights_sha256: str | None = None
    restarts: tuple[Restart, ...] = ()
    goodput: Measured = None
    goodput_split: dict[str, Seconds] | None = None
    checkpoint_every_s: Measured = None
    pace: Paces = field(default_factory=Paces)
    tasks: dict[str, ExitCode | None] = field(default_factory=dict)
    cause: Cause | None = field(default=None, metadata=SPARSE)
    """Only of a failed run."""
    membership: tuple[MembershipChange, ...] = field(default=(), metadata=SPARSE)

    @property
    def score(self) -> tuple[str, float] | None:
        """The name and value of the one metric that stands for the model's quality: the first that is not the loss."""
        evaluated = [(name, value) for name, value in self.metrics.items() if name.startswith(EVALUATED)]
        known = [(name.removeprefix(EVALUATED), value) for name, value in evaluated if value is not None]
        return min(known, key=lambda each: each[0] == "loss", default=None)

    @property
    def failure(self) -> Cause | None:
        """The cause of a failed run, which may be unknown; None for any other run."""
        return (self.cause or Cause()) if self.state == OutcomeState.FAILED else None


def _pid(value: Any) -> int:
    if not 0 < count(value) < 2**22:
        raise ValueError("expected the id of a process")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class Process(Record):
    """A process as `cluster.system.processes` recognizes it."""

    pid: Annotated[int, _pid]
    start_ticks: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Programs(Record):
    """The processes of a task's newest attempt: `control/programs/<task>.json`."""

    agent: Process
    program: Process


@dataclass(frozen=True, kw_only=True)
class CheckpointFile(Record):
    """A file of a checkpoint."""

    size_bytes: Count = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    """The files of a finished checkpoint: `checkpoints/ckpt-<step>.json`."""

    files: dict[str, CheckpointFile]


@dataclass(frozen=True, kw_only=True)
class TraceRequest(Record):
    """A request for a trace of a task's next steps: `control/trace.json`."""

    id: str
    task: str
    steps: Count = 1
    until: Seconds


@dataclass(frozen=True, kw_only=True)
class TraceAnswer(Record):
    """The answer to a request for a trace: the first and the last step, or an error."""

    id: str
    task: str
    first: Count = 0
    last: Count = 0
    error: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class Stages(Record):
    """Where a pipeline's model is cut: `stages.json`."""

    cut: tuple[str, ...] = ()
    """The first layer of each stage but the first."""


TRAINER_IMPORTS = "train.startup.preload"
"""The module that imports everything a training program needs."""


@dataclass(frozen=True, kw_only=True)
class Started(Record):
    """How and when a run was started: `control/started.json`. What is not known is empty or None."""

    time: Seconds | None = field(default=None, metadata=SPARSE)
    runtime: str = field(default="", metadata=SPARSE)
    hang_timeout_s: Seconds | None = field(default=None, metadata=SPARSE)
    max_restarts: Count | None = field(default=None, metadata=SPARSE)
    max_external_restarts: Count | None = field(default=None, metadata=SPARSE)
    min_workers: Count | None = field(default=None, metadata=SPARSE)
    grow: bool = field(default=False, metadata=SPARSE)
    requirements: str = field(default="", metadata=SPARSE)
    memory: str = field(default="", metadata=SPARSE)
    network: str = field(default="", metadata=SPARSE)
    gpus: dict[str, str] = field(default_factory=dict, metadata=SPARSE)
    job: dict[str, str] = field(default_factory=dict, metadata=SPARSE)
    env: tuple[str, ...] = field(default=(), metadata=SPARSE)
    secrets: tuple[str, ...] = field(default=(), metadata=SPARSE)
    code_dirs: tuple[str, ...] = field(default=(), metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class _Config(Record):
    global_batch: Count = field(default=0, metadata=SPARSE)
    bitwise_elastic: Count = field(default=0, metadata=SPARSE)
    micro_batches: Count = field(default=1, metadata=SPARSE)
    loop: str = field(default="", metadata=SPARSE)
    precision: str = field(default="", metadata=SPARSE)
    script: str = field(default="", metadata=SPARSE)
    arguments: tuple[str, ...] = field(default=(), metadata=SPARSE)
    separate_chief: bool = field(default=False, metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class _LocalTask(Record):
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Composed(Record):
    tasks: dict[str, _LocalTask] = field(default_factory=dict, metadata=SPARSE)
    preload: str = field(default="", metadata=SPARSE)
    inherits: tuple[str, ...] = field(default=(), metadata=SPARSE)
    network: str = field(default="", metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class _Manifest(Record):
    runtime: str = field(default="", metadata=SPARSE)


config, manifest = dictionary(_Config), dictionary(_Manifest)
GPUS = "x-gpus"
"""The key of `compose.json` with the GPUs of each task; Compose ignores keys that begin with `x-`."""


def compose(value: Any) -> dict[str, Any]:
    """Check the content of `compose.json`."""
    checked = dictionary(_Composed)(value)
    return checked | ({GPUS: mapping(listing(text))(checked[GPUS])} if GPUS in checked else {})


def _port(value: Any) -> int:
    if count(value) >= 2**16:
        raise ValueError(f"expected a port, found {value}")
    return count(value)


@dataclass(frozen=True, kw_only=True)
class TensorBoardRecord(Record):
    """The TensorBoard that was started for a run: `control/tensorboard.json`."""

    port: Annotated[int, _port]


HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,253}")


def _strategy(value: Any) -> Any:
    return one_of(*STRATEGIES)(value)  # those that are registered now


@dataclass(frozen=True, kw_only=True)
class _Task(Record):
    role: Role
    index: Count
    host: str
    port: Count


@dataclass(frozen=True, kw_only=True)
class _Cluster(Record):
    strategy: Annotated[str, _strategy]
    devices: Count
    tasks: tuple[_Task, ...]
    separate_chief: bool = True
    pipelines: Count = 1


def cluster(value: Any) -> ClusterSpec:
    """Check the content of `cluster.json`."""
    spec = ClusterSpec.from_json(_Cluster.from_json(value).to_json())
    names = [task.name for task in spec.tasks]
    if names.count("chief") != 1 or len(set(names)) < len(names):
        raise ValueError("expected one chief, and every task once")
    if not 1 <= spec.devices <= MAX_DEVICES:
        raise ValueError(f"devices: expected a whole number from 1 to {MAX_DEVICES}")
    if bad := [task for task in spec.tasks if not _listens(task)]:
        raise ValueError(f"tasks: expected an address of {bad[0].name[:40]}")
    return spec


def _listens(task: Task) -> bool:
    return bool(HOST.fullmatch(task.host)) and 0 < task.port < 2**16 and task.index < MAX_TASKS
