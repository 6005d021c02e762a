"""`Model.fit`, `evaluate` and `predict` reduce metrics over several tasks as the scalars they are.

Defect: `reduce_per_replica` averages along the first axis, which a scalar does not have. Keras issue 20585.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_every_script_patch_must_still_be_needed
Not applied: if `reduce_per_replica`, tried on a number, does not reduce along axis 0.
"""

import contextlib
from typing import Any

import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import trainer  # has no public name

from .trial_strategy import TrialStrategy

_keras_reduce = trainer.reduce_per_replica


def apply() -> list[str]:
    """Replace the function if Keras has the defect."""
    strategy = TrialStrategy()
    with contextlib.suppress(Exception):
        trainer.reduce_per_replica(1.0, strategy, "mean")
    if strategy.reduced_axes != [0]:
        return []
    trainer.reduce_per_replica = _reduce_per_replica
    return ["reduce_per_replica"]


def _reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
    """Reduce each replica's values, which may be scalars, to those of all replicas of all tasks."""
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if reduction in ("auto", "mean", "sum") and multi_worker and strategy.extended._in_multi_worker_mode():
        operation = "SUM" if reduction == "sum" else "MEAN"
        return tree.map_structure(lambda value: strategy.reduce(operation, value, axis=None), values)
    return _keras_reduce(values, strategy, reduction)
