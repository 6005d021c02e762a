"""The tasks of a script draw one order of the arrays that `fit` shuffles, and take their parts of it.

Defect: each task draws another order and takes its part of that: an epoch has some examples twice and lacks others.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_an_epoch_of_shuffled_arrays_must_have_every_example_once
Not applied: to a task that trains alone, to `shuffle="batch"`, and after `keras.utils.set_random_seed`, which gives all
tasks one order.
"""

import itertools
import os
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context  # the seed has no public name

_keras_dataset = ArrayDataAdapter.get_tf_dataset
_numbers = itertools.count()


def _get_tf_dataset(adapter: Any) -> tf.data.Dataset:
    if adapter._shuffle is not True or not os.environ.get("TF_CONFIG") or context.global_seed() is not None:
        return _keras_dataset(adapter)
    # Local runs have a random token; elsewhere all runs draw the same orders.
    order = np.random.default_rng([*os.environ.get("TF_CLUSTER_TOKEN", "").encode(), next(_numbers)])

    def shuffle(indices: tf.Tensor) -> tf.Tensor:
        drawn = tf.numpy_function(lambda: order.permutation(adapter._num_samples), [], tf.int64)
        return tf.ensure_shape(drawn, indices.shape)

    original, tf.random.shuffle = tf.random.shuffle, shuffle  # Keras calls it while it builds the dataset
    try:
        return _keras_dataset(adapter)
    finally:
        tf.random.shuffle = original


REPLACED = [(ArrayDataAdapter, "get_tf_dataset", _get_tf_dataset, {"defect": r"tf\.random\.shuffle\(indices\)"})]
