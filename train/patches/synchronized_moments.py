"""BatchNormalization computes its moments over the global batch as exactly as one device, with a mask or without.

Defect: a synchronized layer computes the variance as the mean of squares minus the square of the mean, in which float32
has no digits left for features such as years or times; and with a mask it computes the moments of each replica alone.
Versions: Keras 3.15.1.
Test: tests/process/train/test_trainer_patches.py::test_keras_itself_loses_the_variance_of_large_numbers
Not applied: if `BatchNormalization._moments` sums over replicas with a mask, too.
"""

from typing import Any

import keras
import tensorflow as tf

keras_moments = keras.layers.BatchNormalization._moments


def moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and the variance over the positions that the mask keeps, on all replicas."""
    context = tf.distribute.get_replica_context()
    if not layer.synchronized or context is None or context.num_replicas_in_sync == 1:
        return keras_moments(layer, inputs, mask)
    axes, kept = layer._reduction_axes, None
    if mask is not None:
        kept = tf.cast(tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs)), tf.bool)

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values if kept is None else tf.where(kept, values, 0), axes, keepdims=True)

    def over_replicas(values: Any) -> Any:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    sums, counts = over_replicas([total(inputs), total(tf.ones_like(inputs))])
    if kept is not None:
        counts += keras.config.epsilon()
    mean = sums / counts
    variance = over_replicas(total(tf.square(inputs - mean))) / counts
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


REPLACED = [
    (
        keras.layers.BatchNormalization,
        "_moments",
        moments,
        {"fixed": r"all_reduce|(?s:self\.synchronized.*self\.synchronized)"},
    )
]
