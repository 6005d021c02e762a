"""The state of callbacks in a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from train.loops.callbacks import CallbackProgress, attributes, restore
from train.loops.plain_values import decode, encode


def saved(callback: Any, made: dict[str, bytes]) -> CallbackProgress:
    """Return the state of a callback after a round trip through a checkpoint."""
    changed = {name: value for name, value in attributes(callback)[0].items() if made[name] != value}
    return CallbackProgress(**decode(encode(vars(CallbackProgress(callbacks=[changed])))))


@pytest.mark.parametrize(
    "value",
    [
        {3: "three", (1, "a"): None, np.int64(7): 7.5},
        {"b": 1, "a": 2},  # in this order
        {(1, 2), "x", None},
        b"\x00\xff",
        Path("some/file"),
        [float("inf"), -(10**30), True, "é"],
    ],
)
def test_containers_keep_their_types_keys_and_order(value):
    whole = decode(encode(value))
    assert (type(value), value) == (type(whole), whole)
    assert not isinstance(value, dict) or list(value) == list(whole)


@pytest.mark.parametrize("array", [np.float32([[1, np.nan]]), np.array("2026-01-01", "M8[D]"), np.array(["a", "bc"])])
def test_arrays_keep_their_type_and_bits(array):
    whole = decode(encode([array]))[0]
    assert (array.dtype, array.shape, array.tobytes()) == (whole.dtype, whole.shape, whole.tobytes())


class Counting(keras.callbacks.Callback):
    """State in places of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[Any, list[float]] = {}
        self.mean, self.variable = keras.metrics.Mean(), tf.Variable(1.0)
        self.rate = abs
        self._private = 0
        self.other: Any = None

    def change(self) -> tuple[Any, ...]:
        """Change all attributes and return them."""
        self._private += 1
        self.groups[self._private, "sum"] = [self.rate(-2.0)]
        self.mean.update_state(self._private)
        self.variable.assign_add(1.0)
        return self._private, dict(self.groups), float(self.mean.result()), float(self.variable)


def test_containers_variables_and_private_attributes_are_restored():
    first, undisturbed, resumed = Counting(), Counting(), Counting()
    made = attributes(first)[0]
    assert first.change() == undisturbed.change()
    assert [] == restore([resumed], saved(first, made))
    assert undisturbed.change() == resumed.change()


def test_attributes_that_cannot_be_saved_are_named():
    callback, total = Counting(), [0.0]
    assert {} == attributes(callback)[1]
    callback.other, callback.rate = [keras.callbacks.EarlyStopping()], lambda value: total[0] + value
    assert {"other": "list", "rate": "function"} == attributes(callback)[1]


def test_an_attribute_of_another_type_is_not_restored():
    first, other = Counting(), Counting()
    made = attributes(first)[0]
    first.change()
    other.mean = None
    assert ["Counting.mean"] == restore([other], saved(first, made))
    assert other.mean is None
