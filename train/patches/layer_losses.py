"""The losses that layers add are kept apart by thread, and so by replica.

Defect: all replicas of a process share `Layer._losses`. They take turns where they exchange something, such as in
BatchNormalization, and then clear each other's losses.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_every_script_patch_must_still_be_needed
Not applied: if `Layer._losses` is a property, or `Layer._clear_losses` mentions threads.
"""

import inspect
import threading
import weakref
from typing import Any

import keras


def apply() -> list[str]:
    """Replace the lists of losses if replicas share them."""
    layer = keras.layers.Layer
    if isinstance(vars(layer).get("_losses"), property) or "thread" in inspect.getsource(layer._clear_losses):
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
