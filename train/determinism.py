"""Settings of TensorFlow and Keras that make a run bitwise repeatable."""

import os

import tensorflow as tf
from tensorflow import keras

from cluster.contract import settings
from train import patches
from train.config import TrainConfig
from train.model.export import is_legacy
from train.patches import exact_order


def configure_threads(config: TrainConfig) -> None:
    """Set the numbers of threads. Call before any device is used, because that fixes them for the process."""
    tf.config.threading.set_intra_op_parallelism_threads(config.threads)
    for name, value in settings.one_core_threads().items():
        os.environ.setdefault(name, value)


def configure_operations(config: TrainConfig) -> None:
    """Seed the generators, make operations deterministic as configured, and keep the order of sums."""
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    if not is_legacy():
        patches.apply()
    exact_order.keep_order_of_sums(config.micro_batches, deterministic=config.deterministic)
