"""BatchNormalization leaves masked positions out over the global batch.

Defect: a synchronized layer computes moments over all replicas without a mask, but only local ones with a mask.
Versions: Keras 3.15.1.
Test: tests/process/train/test_trainer_patches.py::test_keras_itself_leaves_them_out_by_replica
Not applied: if `BatchNormalization._moments` sums over replicas with a mask, too.
"""

from typing import Any

import keras
import tensorflow as tf

keras_moments = keras.layers.BatchNormalization._moments


def moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and the variance over the positions that the mask keeps, on all replicas."""
    context = tf.distribute.get_replica_context()
    if mask is None or not layer.synchronized or context is None or context.num_replicas_in_sync == 1:
        return keras_moments(layer, inputs, mask)
    kept = tf.cast(tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs)), tf.bool)

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.where(kept, values, 0), layer._reduction_axes, keepdims=True)

    def over_replicas(values: Any) -> Any:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    sums, counts = over_replicas([total(inputs), total(tf.ones_like(inputs))])
    counts += keras.config.epsilon()
    mean = sums / counts
    variance = over_replicas(total(tf.square(inputs - mean))) / counts
    return tf.squeeze(mean), tf.squeeze(variance)


REPLACED = [
    (
        keras.layers.BatchNormalization,
        "_moments",
        moments,
        {"fixed": r"all_reduce|(?s:self\.synchronized.*self\.synchronized)"},
    )
]
