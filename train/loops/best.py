"""The best evaluation so far, and early stopping when no evaluation has been better for long.

Both follow from the evaluations, which are the same in every task, and are part of the checkpoint: a resumed run
continues to count and ends at the same step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import tensorflow as tf

from cluster.system.errors import UsageError, nearest
from train.context import TaskContext
from train.settings.stopping import Best as Settings


class BestState(tf.Module):
    """A variable of the checkpoint that holds the state of `Best`."""

    def __init__(self) -> None:
        """Call outside the strategy's scope: the variable belongs to this task."""
        super().__init__(name="best")
        with tf.device("CPU:0"):
            self.encoded = tf.Variable(b"", trainable=False, dtype=tf.string)


class Best:
    """Follows the evaluations of a training."""

    def __init__(self, settings: Settings, total_steps: int, state: BestState) -> None:
        """Restore the state of the checkpoint.

        Args:
            settings: the metric, its direction and the patience.
            total_steps: steps of the whole training; a training that ended early continues if there are more now.
        """
        self._settings, self._total, self._state = settings, total_steps, state
        encoded = state.encoded.numpy()
        kept = json.loads(encoded) if encoded else {}
        self.value: float | None = kept.get("value")
        """The best value so far."""
        self.step: int = kept.get("step", 0)
        """Steps done when it was found."""
        self.evaluated_at: int = kept.get("evaluated_at", -1)
        """Steps done at the newest evaluation."""
        self._worse: int = kept.get("worse", 0)
        self.enough: bool = kept.get("ended_at") == total_steps
        """Whether training must end."""

    def follow(self, step: int, results: Mapping[str, float]) -> bool:
        """Count the results of an evaluation; return whether they are the best so far."""
        self.evaluated_at, value, settings = step, results[self._settings.metric], self._settings
        gain = math.inf if self.value is None else settings.sign * (value - self.value)
        if math.isfinite(value) and gain > settings.min_delta:
            self.value, self.step, self._worse = value, step, 0
            return True
        self._worse += 1
        self.enough |= 0 < settings.patience <= self._worse
        return False

    def keep(self) -> None:
        """Store the state in the next checkpoint."""
        ended_at = self._total if self.enough else None
        counted = {"value": self.value, "step": self.step, "worse": self._worse, "ended_at": ended_at}
        counted["evaluated_at"] = self.evaluated_at
        self._state.encoded.assign(json.dumps(counted))


def check_metric(context: TaskContext) -> None:
    """Check that evaluations report the metric.

    Raises:
        UsageError: they do not; the message offers the nearest name.
    """
    known, metric = context.objective.evaluated, context.config.best.metric
    if metric not in known:
        raise UsageError(f"--best.metric {metric!r}{nearest(metric, known)}")
