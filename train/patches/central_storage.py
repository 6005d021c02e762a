"""Replicas can assign variables under CentralStorageStrategy, as constraints, layers and Nadam do.

Defect: Keras creates variables without an aggregation, and the strategy refuses to assign those.
Versions: Keras 3.15.1 with TensorFlow 2.21.0.
Test: tests/process/train/test_trainer_patches.py::test_central_storage_itself_refuses_dropout
Not applied: to variables of other strategies, and to those that have an aggregation.
"""

from collections.abc import Iterable

import keras
import tensorflow as tf
from tensorflow.python.distribute.ps_values import AggregatingVariable  # has no public name


def let_replicas_assign(variables: Iterable[keras.Variable]) -> None:
    """Set an aggregation for variables of a model or an optimizer. All replicas assign the same value."""
    kinds = tf.VariableAggregation
    for variable in variables:
        stored = getattr(variable, "_value", None)
        if isinstance(stored, AggregatingVariable) and stored._aggregation == kinds.NONE:
            stored._aggregation = kinds.ONLY_FIRST_REPLICA
