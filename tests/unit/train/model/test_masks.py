"""The mask of a model's output: where it is expected, and what padding counts. Trainings: `tests/differential`."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

from train.model import masks


def test_the_mask_of_a_nested_model_is_expected_where_its_symbolic_output_has_none():
    layers = keras.layers
    inner = keras.Sequential([keras.Input((3, 4)), layers.Dense(4)])
    model = keras.Sequential([keras.Input((3,)), layers.Embedding(5, 4, mask_zero=True), inner, layers.Dense(2)])
    assert masks.mask_of(model(tf.ones([1, 3]))) is not None
    assert masks.may_begin_in(model)
    assert not masks.may_begin_in(inner)


def test_an_example_of_padding_alone_counts_nothing():
    values = tf.constant([[1.0, 2.0], [8.0, np.nan], [np.inf, 3.0]])
    mask = tf.constant([[True, True], [True, False], [False, False]])
    np.testing.assert_allclose(masks.average_by_example(values, mask), [3.0, 8.0, 0.0])  # 3 positions of 3 examples
    np.testing.assert_allclose(masks.average_by_example(values[:1], mask[2:]), [0.0])
