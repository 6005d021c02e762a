"""BatchNormalization of a script survives a batch that leaves a replica without examples.

Defect: the moments of no examples are NaN, and so become moving averages and gradients on all replicas. Some replicas
get no examples, such as of a last batch that has fewer than there are replicas.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_a_replica_without_examples_must_not_spoil_the_averages
Not applied: to synchronized layers, whose moments are those of all replicas.
"""

from typing import Any

import keras
import tensorflow as tf

_keras_moments = keras.layers.BatchNormalization._moments


def _moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and the variance of the inputs; without any, the moving ones."""
    moments = _keras_moments(layer, inputs, mask)
    if layer.synchronized:
        return moments
    empty, moving = tf.equal(tf.shape(inputs)[0], 0), (layer.moving_mean, layer.moving_variance)
    mean, variance = (tf.where(empty, tf.cast(old, new.dtype), new) for old, new in zip(moving, moments, strict=True))
    return mean, variance


REPLACED = [(keras.layers.BatchNormalization, "_moments", _moments, {"fixed": "_support_zero_size_input"})]
