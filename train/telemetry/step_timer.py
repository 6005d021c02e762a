"""Measures the steps of a task by marks inside their graph, which distinguish its work from waiting.

Under a synchronous strategy the steps of all tasks take as long as the slowest task's; tasks differ in how much of that
time they are busy. A mark waits for the computation that it times, and no computation waits for a mark, so that steps
have the same order and bits as without marks. A step begins when the previous one has ended with its update, which
includes waiting for the others.

A mark reads Python's clock, because TensorFlow's clock cannot be read in a deterministic process, and stores the time
in this object. That costs about 50 us on a busy machine, so not all short steps are marked.

Shapes: S steps; columns: whole step, input, busy.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.contract.run.records import Pace

STEP_COST_S = 200e-6
"""Largest cost of the marks of one step."""
COST_SHARE = 0.004
"""Largest share of the time for marks, which determines the interval between marked steps."""
RECENT = 200
"""Number of newest steps in the heartbeat."""
KEPT = 4096
"""Number of newest steps that are kept."""

Marked = tuple[tf.Tensor, ...]
"""Whether a step is marked, a bool scalar; empty if steps cannot be marked."""


@dataclass(frozen=True)
class Times:
    """Times of optimizer steps of one task, or of a sample of them, in seconds; None for unknown parts."""

    steps: np.ndarray
    """`[S] float64`: whole steps, including waiting for other tasks."""
    inputs: np.ndarray | None = None
    """`[S] float64`: waiting for the batch."""
    busy: np.ndarray | None = None
    """`[S] float64`: until the batch had arrived and the task's gradients were computed."""

    @property
    def input_share(self) -> float:
        """Share of the time spent waiting for batches; 0 if unknown."""
        return 0.0 if self.inputs is None or not self.steps.any() else float(self.inputs.sum() / self.steps.sum())


class StepTimer:
    """Measures the steps of one loop."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        devices = [tf.DeviceSpec.from_string(name).device_type for name in strategy.extended.worker_devices]
        self.works = set(devices) == {"CPU"}
        """Whether marks work: a TPU has no clock, and a GPU executes computations later."""
        self.every = 1
        """Interval between marked steps."""
        self._marks: list[tuple[str, float]] = []
        self._first_replica: tf.distribute.ReplicaContext | None = None

    def begin(self, done: tf.Tensor, every: tf.Tensor) -> Marked:
        """Mark the beginning of a step inside the graph; return whether it is marked."""
        if not self.works:
            return ()
        phase = done % every
        begun = self._mark("begin", phase <= 1)  # a marked step ends when the next one begins
        with tf.control_dependencies([begun]):  # so that the other marks of the step come later
            return (tf.equal(phase, 0),)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._first_replica = None
        return self._strategy.run(function, args=args)

    def of_replica(self, marked: Marked) -> Marked:
        """Return `marked` on the first replica of this task only: others would mark later, in the order of tracing."""
        replica = tf.distribute.get_replica_context()
        if self._first_replica is None:
            self._first_replica = replica
        return marked if replica is self._first_replica else ()

    def next_batch(self, results: Any, batch: Any, marked: Marked) -> Any:
        """Mark the beginning and the end of the wait for the next batch; return the batch, after both marks."""
        if not marked:
            return batch
        asks = self._mark("asks", marked[0], results)
        with tf.control_dependencies([self._mark("batch", marked[0], (asks, batch))]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    def end(self, results: Any) -> None:
        if self.works:
            self._mark("begin", tf.constant(True), results)

    def mark(self, event: str, marked: Marked, after: Any) -> None:
        """Mark inside the graph that `after` is computed, if the step is marked."""
        if marked:
            self._mark(event, marked[0], after)

    def _mark(self, event: str, marked: tf.Tensor, after: Any = ()) -> tf.Tensor:
        """Record the time once `after` is computed, if `marked`; return a tensor to wait for."""
        nothing = np.zeros((), np.int32)

        def record() -> np.ndarray:
            self._marks.append((event, time.perf_counter()))
            return nothing

        def recorded() -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(record, [], tf.int32), [])

        tensors = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
        with tf.control_dependencies(tensors):
            return tf.cond(marked, recorded, lambda: tf.constant(0))

    def take(self, count: int, seconds: float) -> Times | None:
        """Return and clear the times of a call of `count` steps that took `seconds`."""
        if not self.works:
            return None
        self.every = max(1, math.ceil(STEP_COST_S / COST_SHARE * count / seconds))
        marks, self._marks = self._marks, []
        return times_from_marks(marks) if count else None


class StepTiming:
    """Collects the step times of one generation."""

    def __init__(self) -> None:
        self._kept_S3 = np.zeros((0, 3))
        self.steps = 0

    def add(self, times: Times) -> None:
        unknown_S = np.full(len(times.steps), np.nan)
        parts = (times.steps, *(unknown_S if part is None else part for part in (times.inputs, times.busy)))
        rows_S3 = np.stack(parts, 1)
        self.steps += len(rows_S3)
        self._kept_S3 = np.concatenate([self._kept_S3, rows_S3])[-KEPT:]

    def recent(self) -> dict[str, Any]:
        """Return the statistics of the newest steps for the heartbeat; empty without steps."""
        return _describe(self._kept_S3[-RECENT:], {"median": 50, "p90": 90}) if self.steps else {}

    def generation(self) -> Pace:
        percentiles = {f"p{number}": number for number in (10, 50, 90, 99)}
        return Pace(steps=self.steps, **_describe(self._kept_S3, percentiles)) if self.steps else Pace()


def _describe(rows_S3: np.ndarray, percentiles: dict[str, int]) -> dict[str, Any]:
    ms_S, (step_s, input_s, busy_s) = rows_S3[:, 0] * 1000, rows_S3.sum(0)
    statistics = {"mean": ms_S.mean()} | {name: np.percentile(ms_S, number) for name, number in percentiles.items()}
    statistics["max"] = ms_S.max()
    parts_s = (("input_share", input_s), ("busy_share", busy_s))
    return {
        "step_ms": {name: round(float(value), 3) for name, value in statistics.items()},
        **{name: round(float(part / step_s), 4) if step_s and not np.isnan(part) else None for name, part in parts_s},
    }


def times_from_marks(marks: list[tuple[str, float]]) -> Times:
    """Return the times of completely marked steps from the ordered marks.

    A batch that is requested after the gradients belongs to the next step; waiting for it counts as this task's work.
    """
    rows, begun, requested, waited, computed = [], 0.0, 0.0, 0.0, None
    for event, moment in marks:
        if event == "begin":
            if computed is not None:
                rows.append((moment - begun, waited, computed - begun))
            begun = requested = moment
            waited, computed = 0.0, None
        elif event == "asks":
            requested = moment
        elif event == "batch":
            waited += moment - requested
            computed = None if computed is None else computed + moment - requested
        else:
            computed = moment
    return Times(*np.array(rows, np.float64).reshape(-1, 3).T)
