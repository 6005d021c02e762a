"""Shared parts of the TensorFlow baselines: the tutorials' two-conv CNN, and the strategy that TF_CONFIG implies."""

from __future__ import annotations

import os

import tensorflow as tf


def create_strategy(threads: int) -> tf.distribute.Strategy:
    """Return the strategy of one of several workers, or without TF_CONFIG of this process alone.

    Args:
        threads: intra-op threads; 0: one per core.
    """
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.OneDeviceStrategy("/CPU:0")


def create_model() -> tf.keras.Model:
    """Return the tutorials' two-conv CNN."""
    return tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer((28, 28, 1)),
            tf.keras.layers.Rescaling(1 / 255),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
