"""The losses that layers add, and the dropout masks of a recurrent cell, are kept per thread, and so per replica.

Defect: all replicas of a process share `Layer._losses` and a cell's masks. They take turns where they exchange
something, such as in BatchNormalization, and then clear each other's losses and drop units by each other's masks.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_every_script_patch_must_still_be_needed
Not applied: if `Layer._losses` is a property, or `Layer._clear_losses` mentions threads.
"""

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell  # has no public name


def apply() -> list[str]:
    """Replace the attributes if replicas share them."""
    layer = keras.layers.Layer
    if isinstance(vars(layer).get("_losses"), property) or "thread" in inspect.getsource(layer._clear_losses):
        return []
    layer._losses, layer._loss_ids = _by_thread(list), _by_thread(set)
    DropoutRNNCell._dropout_mask, DropoutRNNCell._recurrent_dropout_mask = _by_thread(_mask), _by_thread(_mask)
    return ["Layer.losses"]


def _mask(value: Any = None) -> Any:
    return value


def _by_thread(new: Callable[..., Any]) -> property:
    local = threading.local()

    def values() -> Any:
        if not hasattr(local, "values"):
            local.values = weakref.WeakKeyDictionary()
        return local.values

    def set_value(layer: Any, value: Any) -> None:
        values()[layer] = new(value)

    return property(lambda layer: values().setdefault(layer, new()), set_value)
