"""What the steps of one task take, by marks inside their graph: only there can a task tell its own work from waiting.

Under a synchronous strategy the steps of all tasks take equally long, that of the slowest; what tells them apart is how
much of it each is busy. A mark waits for what it is the time of, and nothing waits for a mark, so that the step is done
in the order and with the bits of one without. A step of the next call or iteration begins once all of one before is
done: its update, and the waiting for the others in it.

Shapes: S steps of one loop.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Times:
    """What some optimizer steps of one task took, a sample of them, in seconds. None: cannot be told apart there."""

    steps: np.ndarray
    """`[S] float64`: whole steps, waiting for other tasks included."""
    inputs: np.ndarray | None = None
    """`[S] float64`: until the batch was there."""
    busy: np.ndarray | None = None
    """`[S] float64`: until the batch was there and the task's own gradients were computed."""

    @property
    def input_share(self) -> float:
        """Which part of the time the batches were waited for; 0 where that cannot be told."""
        return 0.0 if self.inputs is None or not self.steps.any() else float(self.inputs.sum() / self.steps.sum())

    @classmethod
    def from_marks(cls, marks_S3: np.ndarray, end: float) -> Times:
        """Return the times of the steps that were marked, by the marks of all and the moment when the last was done."""
        begun_S, inputs_S, computed_S = marks_S3.T
        (marked,) = np.nonzero(computed_S)
        steps = (np.append(begun_S, end)[1:] - begun_S)[marked]
        busy = (computed_S - begun_S)[marked].clip(0, steps)
        return cls(steps, inputs_S[marked].clip(0, busy), busy)


class Stopwatch:
    """Takes the marks of one optimizer step of one replica."""

    def __init__(self, marked: tf.Tensor | None = None, begun: tf.Tensor | None = None) -> None:
        """Begin with a step.

        Args:
            marked: bool scalar, whether this step is one to be marked; None: no step is.
            begun: when it began.
        """
        self.marked = marked
        self._begun = begun
        self.inputs: tf.Tensor | None = None
        """Scalar float64: how long the step waited for its batch."""
        self._computed: tf.Tensor | None = None

    @property
    def on(self) -> bool:
        """Whether any step is marked."""
        return self.marked is not None

    def has_batch(self, batch: Any) -> None:
        """Mark that the batch is there."""
        if self.on:
            self.inputs = now(self.marked, batch) - self._begun

    def waited(self, *more: tf.Tensor) -> None:
        """Tell how many seconds were waited besides, for what the batch is made of."""
        self.inputs = tf.add_n([self.inputs, *map(tf.reduce_sum, more)]) if more else self.inputs

    def has_gradients(self, gradients: Any) -> None:
        """Mark that the replica's own gradients are computed."""
        if self.on:
            self._computed = now(self.marked, gradients)

    def marks(self) -> tf.Tensor:
        """Return when the step began, how long it waited for its batch, and when it had its gradients: `[3]`."""
        return tf.stack([self._begun, self.inputs, self._computed])


class Sampling:
    """Says how many steps there are to a marked one, so that marks cost next to nothing however short the steps are."""

    COST_S = 200e-6
    """What the marks of one step cost at most, on a busy machine."""
    SHARE = 0.005
    """Of the time, for marks."""

    def __init__(self) -> None:
        self.every = 1

    def adapt(self, step_s: float) -> None:
        """Take the newest steps' time into account."""
        self.every = max(1, math.ceil(self.COST_S / (self.SHARE * step_s)))


def works_under(strategy: tf.distribute.Strategy) -> bool:
    """Whether marks can be taken, and are true: a TPU has no clock, and a GPU is only told what to compute by then."""
    devices = [tf.DeviceSpec.from_string(name).device_type for name in strategy.extended.worker_devices]
    return set(devices) == {"CPU"}


def now(marked: tf.Tensor, after: Any = ()) -> tf.Tensor:
    """Return the time once `after` is there: scalar float64, in seconds; 0 unless it is `marked`.

    By Python's clock: TensorFlow's own refuses to be read in a deterministic process.
    """
    there = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
    with tf.control_dependencies(there):
        return tf.cond(marked, _clock, lambda: tf.constant(0.0, tf.float64))


def _clock() -> tf.Tensor:
    return tf.ensure_shape(tf.numpy_function(time.perf_counter, [], tf.float64), [])
