"""Adam under a gradient that names a row twice, as that of an embedding does."""

import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow import keras

from train.patches import repeated_rows

SLICES = tf.IndexedSlices(tf.ones([4, 2]), tf.constant([1, 0, 1, 1]), tf.constant([3, 2]))


def step(gradient: tf.Tensor | tf.IndexedSlices) -> np.ndarray:
    weights = keras.Variable(np.zeros([3, 2], np.float32))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([weights])
    optimizer.apply([gradient], [weights])
    return np.asarray(weights.numpy())


def test_it_does_the_step_of_the_sum(monkeypatch):
    monkeypatch.setattr(TFOptimizer, "_distributed_tf_update_step", repeated_rows.update)
    np.testing.assert_array_equal(step(tf.convert_to_tensor(SLICES)), step(SLICES))


def test_keras_itself_does_a_larger_one(monkeypatch):
    monkeypatch.setattr(TFOptimizer, "_distributed_tf_update_step", repeated_rows.keras_update)
    assert step(SLICES)[1, 0] / step(tf.convert_to_tensor(SLICES))[1, 0] == pytest.approx(3**0.5, rel=1e-3)
