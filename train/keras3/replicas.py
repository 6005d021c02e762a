"""Mends what layers of Keras 3 do on several replicas: moving averages, and dropout.

The built-in trainer has stronger guarantees of its own for both, see `train/model/keras_compat.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

_APART = 0x9E3779B1
"""An odd number of 32 bits: its multiples are all different."""


def apply() -> list[str]:
    """Patch the layers where they still have a defect. Idempotent. Return the names of what was replaced."""
    normalization, generator = keras.layers.BatchNormalization, keras.random.SeedGenerator
    replaced = []
    if not _mentions(normalization.build, "aggregation"):
        normalization.build = _average_over_replicas(normalization.build)
        replaced.append("BatchNormalization.build")
    if not _mentions(generator.next, "replica"):
        generator.next = _draw_by_replica(generator.next)
        replaced.append("SeedGenerator.next")
    return replaced


def _mentions(function: Any, word: str) -> bool:
    return word in inspect.getsource(function)


def _average_over_replicas(original: Any) -> Any:
    def build(layer: Any, input_shape: Any) -> None:  # Keras reads the names of its arguments
        """Build it with moving averages of all replicas: an aggregation, as Keras 2 had.

        Without one each replica has its own, and what the chief saves is that of its part of the data;
        CentralStorageStrategy refuses to update them at all.
        """
        original(layer, input_shape)
        for average in (layer.moving_mean, layer.moving_variance):
            if hasattr(average.value, "_aggregation"):  # under a strategy with replicas
                average.value._aggregation = tf.VariableAggregation.MEAN

    return build


def _draw_by_replica(original: Any) -> Any:
    def next_seed(generator: Any, ordered: bool = True) -> Any:
        """Return a seed of the replica's own: all of them count the same draws."""
        seed = original(generator, ordered)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        apart = tf.cast(context.replica_id_in_sync_group, seed.dtype) * tf.constant(_APART, seed.dtype)
        return seed + tf.stack([apart, tf.zeros_like(apart)])

    return next_seed
