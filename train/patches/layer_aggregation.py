"""Layers' state, such as moving averages, is aggregated over replicas.

Defect: `Layer.add_weight` creates state without an aggregation. Each replica then has its own, and the chief saves the
one for its part of the data; CentralStorageStrategy refuses to update it at all.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_moving_averages_must_be_those_of_all_replicas
Not applied: to variables that have an aggregation. The built-in trainer uses `train/model/layer_state.py` instead.
"""

from typing import Any

import keras
import tensorflow as tf

_keras_add_weight = keras.layers.Layer.add_weight


def aggregate(variable: Any) -> None:
    """Set the aggregation of a layer's state if it has none: the mean, or for whole numbers the first replica's."""
    value, kinds = variable._value, tf.VariableAggregation
    if hasattr(value, "_aggregation") and variable.aggregation == "none":  # under a strategy with replicas
        value._aggregation = kinds.MEAN if value.dtype.is_floating else kinds.ONLY_FIRST_REPLICA


def add_changes(variable: Any) -> None:
    """Let replicas assign a sum over them: its value before, and all of their changes.

    TensorFlow would add up the assigned values, each of which has the value before.
    """
    variable._direct_assign = lambda value: variable._value.assign_add(
        tf.cast(value, variable._value.dtype) - variable._value
    )


def _add_weight(layer: Any, *args: Any, **options: Any) -> Any:
    variable = _keras_add_weight(layer, *args, **options)
    if not variable.trainable:
        aggregate(variable)
        if variable.aggregation == "sum":
            add_changes(variable)
    return variable


REPLACED = [(keras.layers.Layer, "add_weight", _add_weight, {"fixed": r"aggregate\("})]
