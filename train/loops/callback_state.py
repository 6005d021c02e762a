"""What callbacks have counted so far, as a part of the checkpoint: a restart must not change when training stops.

Of every callback the public attributes are saved that have changed since it was made, where they are made of numbers,
text, lists, tuples, dictionaries and NumPy arrays: the patience of EarlyStopping and its best weights, the best of
ReduceLROnPlateau and of ModelCheckpoint, what one of the user's own counts. All else, such as open files and paths of
the task's own, stays as each generation makes it. Nothing is pickled: reading a checkpoint runs no code.

Keras 3 chooses the comparison of a monitored value at the end of the first epoch and reverses the sign of `min_delta`
then, so the comparison is saved with it: chosen once more, it would reverse the sign again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

APART = ("model", "params", "validation_data")
"""Attributes that Keras gives every callback."""

COMPARISONS = {name: getattr(keras.ops, name) for name in ("less", "greater")} if hasattr(keras, "ops") else {}
"""The functions that Keras 3 compares monitored values with; tf_keras has them from the start."""


@dataclass
class Progress:
    """What is saved."""

    epoch: int = -1
    """The epoch that has begun, from 0; -1: there was no training yet."""
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of this epoch: steps, and the sums of their losses and scores."""
    ended_at: int = 0
    """Of how many steps in all a callback has ended the training; 0: none has."""
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """The changed attributes of each."""
    classes: list[str] = field(default_factory=list)
    """Of the callbacks."""


class CallbackState(tf.Module):
    """A variable of the checkpoint that holds a `Progress`."""

    def __init__(self) -> None:
        """Begin with no training. Call outside of the strategy's scope: the variable is this task's own."""
        super().__init__(name="callbacks")
        with tf.device("CPU:0"):
            self.encoded = tf.Variable(b"", trainable=False, dtype=tf.string)

    def write(self, progress: Progress) -> None:
        """Set what the next checkpoint holds."""
        self.encoded.assign(_encode(vars(progress)))

    def read(self) -> Progress:
        """Return what the checkpoint held that was restored."""
        encoded = self.encoded.numpy()
        return Progress(**_decode(encoded)) if encoded else Progress()


def attributes(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that can be saved, each encoded."""
    found = {}
    for name, value in vars(callback).items():
        if not name.startswith("_") and name not in APART:
            try:
                found[name] = _encode(value)
            except (TypeError, RecursionError):
                continue
    return found


def changed(callback: Any, made: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a callback that are not what `attributes` said when it was made."""
    return {name: getattr(callback, name) for name, value in attributes(callback).items() if made.get(name) != value}


def restore(callbacks: Sequence[Any], progress: Progress) -> bool:
    """Restore the attributes of callbacks; return False, and leave them, where they are not those that were saved."""
    if [type(callback).__name__ for callback in callbacks] != progress.classes:
        return False
    for callback, values in zip(callbacks, progress.callbacks, strict=True):
        for name, value in values.items():
            setattr(callback, name, value)
    return True


def _encode(value: Any) -> bytes:
    """Return a value as bytes, the same for the same value.

    Raises:
        TypeError: something in it cannot be saved.
    """
    arrays: list[np.ndarray] = []
    tree = json.dumps(_plain(value, arrays), sort_keys=True).encode()
    file = io.BytesIO()
    for array in (np.frombuffer(tree, np.uint8), *arrays):
        np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _decode(encoded: bytes) -> Any:
    file, arrays = io.BytesIO(encoded), []
    while file.tell() < len(encoded):
        arrays.append(np.load(file, allow_pickle=False))
    return _whole(json.loads(arrays[0].tobytes()), arrays[1:])


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a value as JSON has it, its arrays apart."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        arrays.append(np.asarray(value))
        return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, comparison in COMPARISONS.items():
        if value is comparison:
            return {"comparison": name}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [_plain(part, arrays) for part in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(part, arrays) for key, part in value.items()}}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def _whole(plain: Any, arrays: list[np.ndarray]) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind in ("array", "scalar"):
        return arrays[value] if kind == "array" else arrays[value][()]
    if kind == "comparison":
        return COMPARISONS[value]
    if kind == "dict":
        return {key: _whole(part, arrays) for key, part in value.items()}
    parts = [_whole(part, arrays) for part in value]
    return parts if kind == "list" else tuple(parts)
