"""`Model.fit`, `evaluate` and `predict` reduce metrics over several tasks as the scalars they are.

Defect: `reduce_per_replica` averages along the first axis, which a scalar does not have, and takes no variable, which
a metric may return as its result. Keras issue 20585.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_every_script_patch_must_still_be_needed
Not applied: if the source of `reduce_per_replica` does not reduce a mean over tasks along axis 0.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import trainer  # has no public name

_keras_reduce = trainer.reduce_per_replica


def _reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if reduction in ("auto", "mean", "sum") and multi_worker and strategy.extended._in_multi_worker_mode():

        def reduce(value: Any) -> Any:
            if isinstance(value, keras.Variable):  # read here, it is that of all replicas
                return tf.convert_to_tensor(value)
            return strategy.reduce("SUM" if reduction == "sum" else "MEAN", value, axis=None)

        return tree.map_structure(reduce, values)
    return _keras_reduce(values, strategy, reduction)


REPLACED = [(trainer, "reduce_per_replica", _reduce_per_replica, {"defect": r"strategy\.reduce\(.*axis=0\)"})]
