"""The records of how a run ended: `summary.json`, and what it is made of."""

from dataclasses import field

from cluster.contract.run.records import OutcomeState, Pace
from cluster.contract.schema import SPARSE, Count, ExitCode, Measured, Number, Record, Seconds

EVALUATED = "eval_"
"""The prefix of the metrics of evaluations."""


class RunResult(Record):
    """The result that the chief's program reports at its end: `control/result.json`."""

    steps: Count | None = None
    epochs: Measured = None
    examples_per_s: Measured = None
    metrics: dict[str, Measured] = field(default_factory=dict)
    weights_sha256: str | None = None
    keras: str | None = None
    """The version of Keras."""


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
    """`memory`: a task's snapshot; `checkpoint`; empty where training began again, and for one task alone."""


class Straggler(Record, kw_only=False):
    """A task that all others wait for."""

    task: str
    slower: Number
    """How many times as long it is busy as the median of the others."""
    input_part: Number
    """The part of the difference that is waiting for input."""

    def __str__(self) -> str:
        return f"{self.task} is {self.slower:.1f}x slower, {self.input_part:.0%} of it in input".replace("%", " %")


class Starved(Record, kw_only=False):
    """A task that waits for its input."""

    task: str
    input_share: Number
    """The share of the time of its steps."""

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
