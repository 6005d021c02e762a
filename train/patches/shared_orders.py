"""The tasks of a script draw one order of the arrays that `fit` shuffles, and take their parts of it.

They warn of a `tf.data.Dataset` that each shuffles in another order: it is not known in time whether they divide it.

Defect: each task draws another order and takes its part of that: an epoch has some examples twice and lacks others.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_an_epoch_of_shuffled_arrays_must_have_every_example_once
Not applied: to a `fit` that does not divide batches among tasks, to `shuffle="batch"`, and after
`keras.utils.set_random_seed`, which gives all tasks one order.
"""

import contextlib
import contextvars
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context  # the seed has no public name

_keras_dataset = ArrayDataAdapter.get_tf_dataset
_divided = contextvars.ContextVar("divided", default=False)
_numbers = itertools.count()
_replacing = threading.Lock()
READING = ("TFRecord", "TextLine", "FixedLength", "Interleave", "FlatMap")
"""Datasets that may read files, which TensorFlow divides among tasks if it can."""


@contextlib.contextmanager
def dividing(divided: bool) -> Iterator[None]:
    """Context manager in which datasets are made whose batches are divided among tasks, if `divided`."""
    before = _divided.set(divided)
    try:
        yield
    finally:
        _divided.reset(before)


def draws_alone(dataset: tf.data.Dataset) -> bool:
    """Whether each task shuffles this dataset in another order before it takes its part; not if tasks divide files."""
    left, found = [dataset], False
    while left:
        current = left.pop()
        if any(part in type(current).__name__ for part in READING):
            return False
        if type(current).__name__ == "_ShuffleDataset":
            found |= [0, 0] == [tf.get_static_value(seed) for seed in (current._seed, current._seed2)]
        left += current._inputs()
    return found


@functools.cache
def warn() -> None:
    """Warn, once, of a dataset that each task shuffles in another order."""
    order = "each task shuffles this dataset in another order before taking its part of it"
    effect = "an epoch has some examples twice and lacks others"
    print(f"warning: {order}: {effect}; give Dataset.shuffle a seed", file=sys.stderr, flush=True)


def _get_tf_dataset(adapter: Any) -> tf.data.Dataset:
    if not _divided.get() or adapter._shuffle is not True or context.global_seed() is not None:
        return _keras_dataset(adapter)
    # Local runs have a random token; elsewhere all runs draw the same orders. Each task makes as many of these calls.
    order = np.random.default_rng([*os.environ.get("TF_CLUSTER_TOKEN", "").encode(), next(_numbers)])
    # TensorFlow never frees the function that draws, which must not refer to the adapter and its arrays.
    size, thread = adapter._num_samples, threading.get_ident()

    def shuffle(values: tf.Tensor, *args: Any, **options: Any) -> tf.Tensor:
        if threading.get_ident() != thread:
            return original(values, *args, **options)
        return tf.ensure_shape(tf.numpy_function(lambda: order.permutation(size), [], tf.int64), values.shape)

    with _replacing:
        original, tf.random.shuffle = tf.random.shuffle, shuffle  # Keras calls it while it builds the dataset
        try:
            return _keras_dataset(adapter)
        finally:
            tf.random.shuffle = original


REPLACED = [(ArrayDataAdapter, "get_tf_dataset", _get_tf_dataset, {"defect": r"tf\.random\.shuffle\(indices\)"})]
