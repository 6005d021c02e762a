"""A strategy without a cluster, on which the patches of `Model.fit` try whether Keras still has a defect."""

import contextlib
from types import SimpleNamespace
from typing import Any

import tensorflow as tf


class TrialStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Pretends to span several tasks and records the axes along which it was asked to reduce."""

    extended = SimpleNamespace(_in_multi_worker_mode=lambda: True)

    def __init__(self) -> None:  # without super().__init__(), which would form a cluster
        self.reduced_axes: list[int | None] = []

    def reduce(self, _operation: Any, value: Any, axis: int | None = None) -> Any:
        self.reduced_axes.append(axis)
        return value

    def experimental_local_results(self, value: Any) -> tuple[Any]:
        return (value,)

    def scope(self) -> Any:
        return contextlib.nullcontext()


class TrialValue(tf.distribute.DistributedValues):
    """A value that is distributed over replicas."""
