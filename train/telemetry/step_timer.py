"""Measures the steps of a task by marks inside their graph, which distinguish its work from waiting.

Under a synchronous strategy the steps of all tasks take as long as the slowest task's; tasks differ in how much of that
time they are busy. A mark waits for the computation that it times, and no computation waits for a mark, so that steps
have the same order and bits as without marks. A step begins when the previous one has ended with its update, which
includes waiting for the others.

A mark reads Python's clock, because TensorFlow's clock cannot be read in a deterministic process, and stores the time
in this object. That costs about 50 us on a busy machine, so not all short steps are marked.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from train.telemetry.timing import Times, times_from_marks

STEP_COST_S = 200e-6
"""Largest cost of the marks of one step."""
COST_SHARE = 0.004
"""Largest share of the time for marks, which determines the interval between marked steps."""

Marked = tuple[tf.Tensor, ...]
"""Whether a step is marked, a bool scalar; empty if steps cannot be marked."""


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
        """Run a part of a step on every replica."""
        self._first_replica = None
        return self._strategy.run(function, args=args)

    def of_replica(self, marked: Marked) -> Marked:
        """Return `marked` on the first replica of this task, the only one that is marked in a part of a step.

        The marks of another replica would come later, in the order of tracing.
        """
        replica = tf.distribute.get_replica_context()
        if self._first_replica is None:
            self._first_replica = replica
        return marked if replica is self._first_replica else ()

    def next_batch(self, results: Any, batch: Any, marked: Marked) -> Any:
        """Mark inside the graph when the step starts and stops to wait for the next batch; return the batch.

        The next step begins with the returned batch, after both marks.
        """
        if not marked:
            return batch
        asks = self._mark("asks", marked[0], results)
        with tf.control_dependencies([self._mark("batch", marked[0], (asks, batch))]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    def end(self, results: Any) -> None:
        """Mark the end of the last step inside the graph."""
        if self.works:
            self._mark("begin", tf.constant(True), results)

    def mark(self, event: str, marked: Marked, after: Any) -> None:
        """Mark inside the graph that `after` is computed, if the step is marked."""
        if marked:
            self._mark(event, marked[0], after)

    def _mark(self, event: str, marked: tf.Tensor, after: Any = ()) -> tf.Tensor:
        """Record the time once `after` is computed, if `marked`; return a tensor to wait for."""
        tensors = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
        with tf.control_dependencies(tensors):
            return tf.cond(marked, lambda: self._recorded(event), lambda: tf.constant(0))

    def take(self, count: int, seconds: float) -> Times | None:
        """Return and clear the times of a call of `count` steps that took `seconds`."""
        if not self.works:
            return None
        self.every = max(1, math.ceil(STEP_COST_S / COST_SHARE * count / seconds))
        marks, self._marks = self._marks, []
        return times_from_marks(marks) if count else None

    def _recorded(self, event: str) -> tf.Tensor:
        nothing = np.zeros((), np.int32)

        def record() -> np.ndarray:
            self._marks.append((event, time.perf_counter()))
            return nothing

        return tf.ensure_shape(tf.numpy_function(record, [], tf.int32), [])
