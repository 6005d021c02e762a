"""The loss is NaN if a gradient is not finite.

Defect: oneDNN's ReLU and max-pooling turn NaN into numbers, so that the loss of broken weights can look sound.
Versions: TensorFlow 2.21.0.
Test: tests/unit/train/patches/test_gradients.py::test_the_loss_is_nan_if_a_gradient_is_not_finite
Not applied: to steps with loss scaling, which checks the gradients itself.
"""

from collections.abc import Sequence

import tensorflow as tf


def nan_if_broken(loss: tf.Tensor, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> tf.Tensor:
    """Return the loss, or NaN if a gradient is not finite."""
    parts = [part.values if isinstance(part, tf.IndexedSlices) else part for part in gradients if part is not None]
    if not parts:
        return loss
    total = tf.add_n([tf.cast(tf.reduce_sum(part), tf.float32) for part in parts])
    return tf.where(tf.math.is_finite(total), loss, tf.constant(float("nan"), loss.dtype))
