"""Repairs what layers of Keras 3 do on several replicas: their state, such as moving averages, losses and dropout.

The built-in trainer has stronger guarantees for state and dropout, see `train/model/layer_state.py` and
`keras_compat.py`.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any

import keras
import tensorflow as tf

_APART = 0x9E3779B1
"""An odd number of 32 bits: its multiples are all different."""


def apply() -> list[str]:
    """Patch the layers where they still have a defect. Idempotent. Return the names of what was replaced."""
    layer, generator = keras.layers.Layer, keras.random.SeedGenerator
    replaced = []
    if not _mentions(layer.add_weight, "aggregate("):
        layer.add_weight = _aggregated(layer.add_weight)
        replaced.append("Layer.add_weight")
    replaced += separate_losses()
    if not _mentions(generator.next, "replica"):
        generator.next = _draw_by_replica(generator.next)
        replaced.append("SeedGenerator.next")
    return replaced


def _mentions(function: Any, word: str) -> bool:
    return word in inspect.getsource(function)


def aggregate(variable: Any) -> None:
    """Give a layer's state an aggregation, unless it has one: the mean, or the first replica's whole numbers.

    Without one each replica has its own, and what the chief saves is that of its part of the data;
    CentralStorageStrategy refuses to update it at all.
    """
    value, kinds = variable._value, tf.VariableAggregation
    if hasattr(value, "_aggregation") and variable.aggregation == "none":  # under a strategy with replicas
        value._aggregation = kinds.MEAN if value.dtype.is_floating else kinds.ONLY_FIRST_REPLICA


def _aggregated(original: Any) -> Any:
    def add_weight(layer: Any, *args: Any, **options: Any) -> Any:
        """Add a variable, which is aggregated over replicas if it is a layer's state."""
        variable = original(layer, *args, **options)
        if not variable.trainable:
            aggregate(variable)
        return variable

    return add_weight


def separate_losses() -> list[str]:
    """Keep the losses that layers add apart by thread, as replicas are: they would clear each other's.

    Replicas take turns where they exchange something, such as in BatchNormalization.
    """
    layer = keras.layers.Layer
    if isinstance(vars(layer).get("_losses"), property) or _mentions(layer._clear_losses, "thread"):
        return []
    layer._losses, layer._loss_ids = _by_thread(list), _by_thread(set)
    return ["Layer.losses"]


def _by_thread(new: type[list[Any]] | type[set[Any]]) -> property:
    local = threading.local()

    def values() -> Any:
        if not hasattr(local, "values"):
            local.values = weakref.WeakKeyDictionary()
        return local.values

    def set_value(layer: Any, value: Any) -> None:
        values()[layer] = new(value)

    return property(lambda layer: values().setdefault(layer, new()), set_value)


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
