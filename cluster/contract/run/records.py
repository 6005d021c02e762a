"""The records of a run's progress and end, checked when they are read: tasks can write anything there."""

from collections.abc import Callable
from dataclasses import field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from cluster.contract.schema import SPARSE, Count, ExitCode, Measured, Number, Record, Seconds, Step, dictionary
from cluster.system.json_files import RECORD_BYTES, REQUIRED, DamagedError, read_json

TASK_BYTES = 2**20
"""Size limit of records that tasks write often."""
EVALUATED = "eval_"
"""The prefix of the metrics of evaluations."""
T = TypeVar("T")
D = TypeVar("D")


def read_record(path: Path, check: Callable[[Any], T], default: D = REQUIRED, *, limit: int = RECORD_BYTES) -> T | D:
    """Read a record of at most `limit` bytes, and validate it by a check such as `Heartbeat.from_json`.

    Without a valid record, return the default; raise DamagedError if there is no default.
    """
    try:
        record: T | D = read_json(path, default, check=check, limit=limit)
        return record
    except FileNotFoundError:
        raise DamagedError(path, "it is missing") from None


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


class Pace(Record):
    """The duration of a task's steps, and the shares of it in which the task waits for input or is busy."""

    steps: Count = 0
    step_ms: dict[str, Measured] | None = None
    input_share: Measured = None
    busy_share: Measured = None


class Place(StrEnum):
    """The barriers at which tasks of a synchronous training wait: at the start, then in this order in each step."""

    START = "start"
    EXCHANGE = "gradient exchange"
    RESULTS = "sum of results"
    EVALUATION = "evaluation"
    COMPARISON = "comparison of the replicas"


class Position(Record):
    """The place that a task entered last, whether it has left that place, and for how many seconds this has held."""

    place: Place
    step: Count
    left: bool
    seconds: Seconds
    unreachable: tuple[str, ...] = field(default=(), metadata=SPARSE)
    """The neighbours to which this task, which waits, can open no connection."""
    batch: Count = field(default=0, metadata=SPARSE)
    """The batches of an evaluation that this task has finished."""


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
    """The pace over all steps of the generation; the three fields above are about the newest steps."""
    position: Position | None = field(default=None, metadata=SPARSE)
    exit_code: ExitCode | None = field(default=None, metadata=SPARSE)
    obstacle: str | None = field(default=None, metadata=SPARSE)
    """The reason why the task cannot listen on its port."""
    importing: bool = field(default=False, metadata=SPARSE)
    """Whether the process is importing the program's libraries."""
    ended: bool = field(default=False, metadata=SPARSE)
    """Whether this is the last heartbeat of the task's agent."""
    updated_at: Seconds

    @property
    def recent_pace(self) -> Pace:
        """The pace of the newest steps."""
        pace = self.pace or Pace()
        return replace(pace, step_ms=self.step_ms, input_share=self.input_share, busy_share=self.busy_share)


class OutcomeState(StrEnum):
    """The ways in which a run ends."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"


class Outcome(Record, sparse=True):
    """How the run ended, and the task at fault: `control/outcome.json`."""

    state: OutcomeState
    time: Seconds
    task: str | None = None
    exit_code: ExitCode | None = None
    step: Count | None = None
    error: str | None = None


class AfterStop(StrEnum):
    """The purpose of a stop request."""

    END = ""
    SCALE = "scale"
    """The run continues immediately on another cluster."""
    REQUEUE = "requeue"
    """The run's job frees its nodes, and the run continues once the job has nodes again."""


class StopRequest(Record):
    """A request that every task saves at the same step and stops: `control/stop.json`."""

    by: str
    then: AfterStop = AfterStop.END
    time: Seconds = 0.0


class EndedAttempt(Record, kw_only=False, sparse=True):
    """How one attempt ended."""

    kind: str = "external"
    last_step: Step = -1
    """The last step of the task at fault; -1 for none."""
    saved: Step = -1
    """The step of the newest checkpoint at that time."""
    runtime_s: Seconds = 0.0
    """How long a script ran; 0 for programs that report steps."""


class _Detail(EndedAttempt):
    cause: str | None = None
    error: str | None = None
    failed_at: Seconds = 0.0
    exit_code: ExitCode | None = None
    pause_s: Seconds = 0.0
    single_steps_from: Count = 0


class Event(Record):
    """A line of `events.jsonl`."""

    time: Seconds
    task: str
    event: str
    generation: Count = 0
    step: Count | None = None
    detail: Annotated[dict[str, Any], dictionary(_Detail)] = field(default_factory=dict)


class _Row(Record):
    step: Count
    time: Seconds = 0.0
    loss: Measured = field(default=None, metadata=SPARSE)
    examples_per_s: Measured = None


row = dictionary(_Row)
"""A line of a task's metrics: a logged step, with metrics of any name."""


class Generation(EndedAttempt):
    """A start of the cluster, and how the previous attempt ended: `control/generations/<generation>.json`.

    A generation without a task was begun by `up` or `scale`.
    """

    generation: Count
    time: Seconds
    resumed: bool = False
    task: str | None = None
    """The task whose failure or return caused the generation."""
    cause: str = ""
    error: str | None = None
    step: Count = 0
    """The newest step of any task at that time."""
    failed_at: Seconds | None = None
    pause_s: Seconds = 0.0
    single_steps_from: Count | None = None
    """The step from which the programs run single steps, see `step_record.single_steps`."""
    left_out: frozenset[str] = frozenset()
    standby_ports: Count | None = None
    """The set of ports, 0 or 1, of the standby cluster with which the generation starts; None without one."""

    @property
    def failure_time(self) -> float:
        """The time of the failure; without a failure, the time of the start."""
        return self.time if self.failed_at is None else self.failed_at

    def require_number(self, number: int) -> Self:
        """Return this record; raise ValueError if it is of another generation."""
        if self.generation != number:
            raise ValueError(f"generation: expected {number}")
        return self


def generation(number: int) -> Callable[[Any], Generation]:
    """Return a check for the record of generation `number`."""
    return lambda value: Generation.from_json(value).require_number(number)


class TimeLedger(Record):
    """The chief's time in one generation: `control/ledgers/<generation>.json`."""

    generation: Count
    began: Seconds
    first_step_at: Seconds | None
    first: Count
    """The number of steps before this generation."""
    restored_from: str = field(default="", metadata=SPARSE)
    """`memory` or `checkpoint`; empty for a training that began from scratch."""
    updated_at: Seconds
    step: Count
    timed_steps: Count
    seconds: dict[str, Seconds]
    """The chief's seconds by activity: `input` and `compute` in its steps, `save` and `evaluate` between them."""
    saves: dict[str, Measured] = field(default_factory=dict)
    """The interval between checkpoints, and the measurements from which it is derived."""


class TraceRequest(Record):
    """A request for a trace of a task's next steps: `control/trace.json`."""

    id: str
    task: str
    steps: Count = 1
    until: Seconds


class TraceAnswer(Record):
    """The answer to a request for a trace: its first and last step, or an error."""

    id: str
    task: str
    first: Count = 0
    last: Count = 0
    error: str | None = field(default=None, metadata=SPARSE)


class RunResult(Record):
    """The result that the chief's program reports at its end: `control/result.json`."""

    steps: Count | None = None
    epochs: Measured = None
    examples_per_s: Measured = None
    metrics: dict[str, Measured] = field(default_factory=dict)
    weights_sha256: str | None = None
    keras: str | None = None


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
    restored_from: str = field(default="", metadata=SPARSE)
    """`memory` (a task's snapshot) or `checkpoint`; empty if training began from scratch or one task restarted."""


class Straggler(Record, kw_only=False):
    """A task that all others wait for."""

    task: str
    slower: Number
    """How many times as long it is busy as the median of the others."""
    input_part: Number
    """The part of the difference that is due to waiting for input."""

    def __str__(self) -> str:
        return f"{self.task} is {self.slower:.1f}x slower, {self.input_part:.0%} of it in input".replace("%", " %")


class Starved(Record, kw_only=False):
    """A task that waits for its input."""

    task: str
    input_share: Number
    """The share of its steps' time in which it waits."""

    def __str__(self) -> str:
        return f"{self.task} waits {self.input_share:.0%} of the time for input".replace("%", " %")


class Paces(Record):
    """The pace of each task, and the tasks that are slower than the others or wait for input."""

    tasks: dict[str, Pace] | None = field(default=None, metadata=SPARSE)
    stragglers: tuple[Straggler, ...] = ()
    starved: tuple[Starved, ...] = ()


class Cause(Record):
    """The failure that ended a run."""

    task: str | None = None
    exit_code: ExitCode | None = None
    step: Count | None = None
    error: str | None = None
    time: Seconds = 0.0


class MembershipChange(Record):
    """A generation whose tasks differ from those of the previous one, and the step from which it continued."""

    generation: Count
    step: Count
    lost: tuple[str, ...]
    regained: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"without {', '.join(self.lost)}"] if self.lost else []
        parts += [f"with {', '.join(self.regained)} again"] if self.regained else []
        return f"{' and '.join(parts)} from step {self.step}"


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
    """Set only for a failed run."""
    membership: tuple[MembershipChange, ...] = field(default=(), metadata=SPARSE)

    @property
    def score(self) -> tuple[str, float] | None:
        """The metric that represents the model's quality, with its value: the first evaluated one except the loss."""
        evaluated = [(name, value) for name, value in self.metrics.items() if name.startswith(EVALUATED)]
        known = [(name.removeprefix(EVALUATED), value) for name, value in evaluated if value is not None]
        return min(known, key=lambda each: each[0] == "loss", default=None)

    @property
    def failure(self) -> Cause | None:
        """The cause of a failed run, which may be unknown; None for any other run."""
        return (self.cause or Cause()) if self.state == OutcomeState.FAILED else None
