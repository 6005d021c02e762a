"""Checkpoints of a script have the layers and variables that a layer holds in a list, dictionary or set.

Defect: Keras 3 hides these collections from TensorFlow, so that `tf.train.Checkpoint` lacks `self.blocks = [...]`.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_hidden_layers.py
Not applied: to exports, where Keras shows them.

The built-in trainer uses `parts_of_model` in `train/saving/trees.py`, which compares with all variables of the model.
"""

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.layer import TFLayer

_keras_children = TFLayer._trackable_children
_keras_lock_state = keras.layers.Layer._lock_state


def _children(layer: Any, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
    """Return the parts of a layer, by name; those in a collection are numbered in its order."""
    children: dict[str, Any] = _keras_children(layer, save_type, **options)
    return children | _collected(layer) if save_type == "checkpoint" else children


def _collected(layer: Any) -> dict[str, Any]:
    """Return the parts of a layer's collections, by names that no attribute has."""
    collected: dict[str, Any] = {}
    for name in layer._tracked:  # attributes whose values Keras has replaced by its own collections
        parts = [] if name == "_layers" else _parts(getattr(layer, name, None))  # of a Sequential: known anyway
        collected |= {f"{name}[{number}]": part for number, part in enumerate(parts)}
    return collected


def _lock_state(layer: Any) -> None:
    """Restore the parts that `build` has created from a checkpoint that was read before."""
    _keras_lock_state(layer)
    for name, part in _collected(layer).items():
        layer._handle_deferred_dependencies(name, part)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tf.__internal__.tracking.Trackable):
        return [value]
    if isinstance(value, set):  # in an order that is the same in every process
        value = sorted(value, key=lambda part: str(getattr(part, "name", "")))
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [part for item in items for part in _parts(item)]


REPLACED = [
    (TFLayer, "_trackable_children", _children, {"defect": "_convert_tracked_collections"}),
    (keras.layers.Layer, "_lock_state", _lock_state, {"fixed": "deferred"}),
]
