"""Calls a dataset function, and checks what it returns.

    def my_data(split, shard):
        return ...  # a tf.data.Dataset of the shard's examples, or an object with __len__ and __getitem__

An example is `(features, labels)` or `(features, labels, weight)`; features and labels are arrays or dictionaries of
arrays, of the types of `train.data.arrays.DTYPES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx  # has no public name

from cluster.system.errors import ClusterError, UsageError
from cluster.system.messages import described
from train.data import arrays
from train.data.function.record import PARTS
from train.settings import references

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Shard:
    """For which part of a split a dataset function is called.

    Attributes:
        index: of the shard, from 0.
        count: shards of the split: together they must have all of its examples, each once.
        seed: of the order of an epoch, an int64 scalar tensor; another one in each epoch, the same for all shards. A
            random-access source is put in order by itself, so to it this is the run's seed, a number.
        data_dir: the folder of prepared data, as this task sees it.
    """

    index: int
    count: int
    seed: Any
    data_dir: Path


def load(name: str) -> Callable[[str, Shard], Any]:
    """Return the function `package.module:function`.

    Raises:
        UsageError: there is none, or it does not take a split and a shard.
    """
    function = references.load("--dataset", name)
    if not callable(function):
        raise UsageError(f"--dataset {name!r} is a {type(function).__name__}; expected a function of (split, shard)")
    try:
        inspect.signature(function).bind("train", None)
    except TypeError:
        raise UsageError(
            f"--dataset {name!r} does not take (split, shard), as --source function calls it; let it, or leave "
            "--source out"
        ) from None
    except ValueError:  # it does not say what it takes
        pass
    return function


def call(name: str, split: str, shard: Shard) -> Any:
    """Return what a dataset function returns for a shard of a split: a `tf.data.Dataset` or a random-access source.

    Raises:
        UsageError: it fails, or returns something else.
    """
    function = load(name)
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):  # in a graph, too, TensorFlow converts what they map
        returned = references.call("--dataset", name, function, split, shard)
    if isinstance(returned, tf.data.Dataset):
        return returned
    if hasattr(type(returned), "__len__") and hasattr(type(returned), "__getitem__"):
        if isinstance(returned, Mapping | tuple | str | bytes | np.ndarray):
            raise UsageError(_wrong(name, split, returned))
        return returned
    raise UsageError(_wrong(name, split, returned))


def parts_of(what: str, example: Any) -> tuple[Any, ...]:
    """Return the features, labels and, if it has one, the weight of an example, or of what describes one.

    Raises:
        UsageError: it is no example.
    """
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        given = f"{len(example)} parts" if isinstance(example, tuple | list) else type(example).__name__
        raise UsageError(f"{what} is {given}; expected (features, labels) or (features, labels, weight)")
    return tuple(example)


def each(function: Callable[..., Any], *parts: Any) -> Any:
    """Return what a function makes of the array of a part of an example, or of each of its dictionary."""
    if isinstance(parts[0], Mapping):
        return {name: function(*(part[name] for part in parts)) for name in parts[0]}
    return function(*parts)


def describe(what: str, example: tuple[Any, ...]) -> dict[str, Any]:
    """Return what `Record.example` holds of an example: of NumPy arrays, or of a dataset's element specification.

    Raises:
        UsageError: it cannot be trained on.
    """

    def leaf(part: str, value: Any) -> dict[str, Any]:
        shape = value.shape
        if isinstance(shape, tf.TensorShape):
            if not shape.is_fully_defined():
                raise UsageError(f"{what}: {part} of the shape {shape}; expected sizes that are known: tf.ensure_shape")
            shape = shape.as_list()
        dtype = value.dtype.as_numpy_dtype if isinstance(value, tf.TensorSpec) else value.dtype
        return {"shape": list(shape), "dtype": arrays.stored_dtype(f"{what}: {part}", part, np.dtype(dtype))}

    described_parts = {}
    for part, values in zip(PARTS, example, strict=False):
        for value in values.values() if isinstance(values, Mapping) else [values]:
            if not isinstance(value, tf.TensorSpec | np.ndarray):
                raise UsageError(
                    f"{what}: {part} are {type(values).__name__}; expected an array or a dictionary of arrays"
                )
        described_parts[part] = each(lambda value, part=part: leaf(part, value), values)
    if "weights" in described_parts and described_parts["weights"].get("shape") != []:
        raise UsageError(f"{what}: weights are {described_parts['weights']}; expected one number")
    return described_parts


def as_arrays(what: str, example: Any) -> tuple[Any, ...]:
    """Return an example of a random-access source with NumPy arrays for what it consists of.

    Raises:
        UsageError: it is no example.
    """
    try:
        return tuple(each(np.asarray, part) for part in parts_of(what, example))
    except ClusterError:
        raise
    except Exception as error:  # what they return may be of any class
        raise UsageError(f"{what} cannot be made into arrays: {described(error)}") from None


def _wrong(name: str, split: str, returned: Any) -> str:
    return (
        f"--dataset {name!r} returns a {type(returned).__name__} for {split!r}; expected a tf.data.Dataset, or an "
        "object with __len__ and __getitem__"
    )
