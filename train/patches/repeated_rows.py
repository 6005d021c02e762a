"""Optimizers get the sum of all parts of an embedding's gradient.

Defect: an embedding's gradient names a row as often as the batch has it. Keras passes that to the optimizer, and Adam
then adds up the squares of a row's parts instead of squaring their sum: its steps are several times too large, and
depend on how a batch is cut.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_gradients.py::test_keras_itself_does_a_larger_step_of_adam
Not applied: if `TFOptimizer._distributed_tf_update_step` converts gradients to tensors.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer  # has no public name

keras_update = TFOptimizer._distributed_tf_update_step


def update(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    pairs: Sequence[tuple[Any, tf.Variable]],
    learning_rate: Any,
) -> None:
    """Update variables by gradients that are already summed over replicas."""

    def update_variable(variable: tf.Variable, gradient: Any, learning_rate: Any) -> Any:
        return optimizer.update_step(tf.convert_to_tensor(gradient), variable, learning_rate)

    for gradient, variable in pairs:
        strategy.extended.update(variable, update_variable, args=(gradient, learning_rate), group=False)


REPLACED = [(TFOptimizer, "_distributed_tf_update_step", update, {"fixed": "convert_to_tensor"})]
