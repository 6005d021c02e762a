"""A layer with the kinds of state that users give their own."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Tracking(keras.layers.Layer):
    """Keeps what users keep: means of the batch, counts of steps and of examples; and adds a loss."""

    def build(self, shape: Sequence[int]) -> None:
        def state(**options: Any) -> Any:
            return self.add_weight(initializer="zeros", trainable=False, **options)

        self.mean = state(shape=(shape[-1],), name="mean")
        self.steps = state(shape=(), dtype="int32", name="steps")
        self.float_steps = state(shape=(), name="float_steps")
        self.examples = state(shape=(), dtype="int64", name="examples", aggregation="sum")
        self.seen = state(shape=(), dtype="bool", name="seen")
        self.fixed = self.add_weight(
            shape=(2,), initializer=lambda *_, **__: [1e30, 1.1], trainable=False, name="fixed"
        )

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        self.add_loss(3.0 * keras.ops.mean(keras.ops.square(inputs)))
        outputs = inputs + self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, axis=0))
            self.steps.assign_add(1)
            self.float_steps.assign_add(1.0)
            self.examples.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "int64"))
            self.seen.assign(True)
        return outputs * (1 + 0.1 * keras.ops.cast(self.steps, inputs.dtype))
