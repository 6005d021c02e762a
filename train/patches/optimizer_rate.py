"""An optimizer uses a learning rate given from outside.

Defect: a schedule is evaluated at the optimizer's own count of updates. A pipeline's stage needs the rate of its step.
Versions: Keras 3.15.1.
Test: tests/differential/test_differential.py::test_a_case_must_train_as_plain_keras_does_or_be_refused
Not applied: outside `fixed_rate`.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf


@contextlib.contextmanager
def fixed_rate(optimizer: keras.optimizers.Optimizer, rate: tf.Tensor) -> Iterator[None]:
    """Make an optimizer use this learning rate inside, instead of the one for its count of updates."""
    optimizer._get_current_learning_rate = lambda: rate
    try:
        yield
    finally:
        del optimizer._get_current_learning_rate
