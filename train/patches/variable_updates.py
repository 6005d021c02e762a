"""`Variable.assign_add` and `assign_sub` are one operation.

Defect: Keras reads, adds and writes. That loses updates where several tasks count at once, and where replicas share one
variable (CentralStorageStrategy) each of them overwrites the others' updates with a sum from the old value.
Versions: Keras 3.15.1.
Test: tests/process/train/test_parameter_server.py::test_keras_itself_loses_updates
Not applied: if the source of a method does not assign a sum or a difference.
"""

import keras
import tensorflow as tf

from train.model.layer_state import is_separate

from . import replace

_keras_assign_add = keras.Variable.assign_add
_keras_assign_sub = keras.Variable.assign_sub


def apply() -> list[str]:
    """Replace both methods if Keras has the defect."""
    added = replace(keras.Variable, "assign_add", assign_add, defect=r"self\.assign\(self")
    return added + replace(keras.Variable, "assign_sub", assign_sub, defect=r"self\.assign\(self")


def assign_add(variable: keras.Variable, value: object) -> object:
    """Add in one operation."""
    if is_separate(variable):
        return _keras_assign_add(variable, value)
    stored = variable._value  # `value` is a copy in a layer that computes in less than float32
    return stored.assign_add(tf.cast(value, stored.dtype))


def assign_sub(variable: keras.Variable, value: object) -> object:
    """Subtract in one operation."""
    if is_separate(variable):
        return _keras_assign_sub(variable, value)
    stored = variable._value
    return stored.assign_sub(tf.cast(value, stored.dtype))
