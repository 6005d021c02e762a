"""`Variable.assign_add` and `assign_sub` are one operation.

Defect: Keras reads, adds and writes. That loses updates where several tasks count at once, and where replicas share one
variable (CentralStorageStrategy) each of them overwrites the others' updates with a sum from the old value.
Versions: Keras 3.15.1.
Test: tests/process/train/test_parameter_server.py::test_keras_itself_loses_updates
Not applied: if the source of a method does not assign a sum or a difference.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from train.model.layer_state import is_separate


def _in_one_operation(name: str) -> Callable[[keras.Variable, object], object]:
    keras_method = getattr(keras.Variable, name)

    def assign(variable: keras.Variable, value: object) -> object:
        if is_separate(variable):
            return keras_method(variable, value)
        stored = variable._value  # `value` is a copy in a layer that computes in less than float32
        return getattr(stored, name)(tf.broadcast_to(tf.cast(value, stored.dtype), stored.shape))

    return assign


assign_add, assign_sub = _in_one_operation("assign_add"), _in_one_operation("assign_sub")


REPLACED = [
    (keras.Variable, "assign_add", assign_add, {"defect": r"self\.assign\(self"}),
    (keras.Variable, "assign_sub", assign_sub, {"defect": r"self\.assign\(self"}),
]
