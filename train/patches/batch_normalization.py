"""BatchNormalization normalizes over the global batch.

Defect: by default each replica normalizes over its own examples, so that the result depends on the number of replicas.
Versions: Keras 3.15.1 and tf_keras 2.21.0, where `synchronized` is False by default.
Test: tests/process/train/test_trainer_patches.py::test_replicas_themselves_normalise_over_their_own_examples
Not applied: on one replica, where layers are not synchronized at all, nor with virtual shards, which must not depend on
each other.
"""

import keras
import tensorflow as tf


def synchronize_batch_normalization(model: keras.Model, replicas: int) -> None:
    """Synchronize every BatchNormalization layer of a model over `replicas`; none if that is 1."""
    for layer in model._flatten_layers():  # includes layers inside layers, which no public property lists
        if isinstance(layer, tf.keras.layers.BatchNormalization):  # of the Keras in use
            layer.synchronized = replicas > 1
