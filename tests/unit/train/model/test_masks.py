"""A mask that reaches the output: padding counts neither in the loss nor in a score, as in Keras on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.measured import measured
from train.model import masks

WHERES = [
    "custom one",
    "custom two",
    "custom two, micro-batches",
    "elastic two",
    "fit one",
    "fit two",
    "fit two, micro-batches",
]


@pytest.mark.parametrize("where", WHERES)
def test_padded_sequences_train_and_evaluate_as_in_keras_on_one_device(where):
    """However unevenly replicas, micro-batches and virtual shards hold the padding."""
    expected, found = measured("masked")["keras"], measured("masked")[where]
    for name in ("losses", "scores", "weights"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)
    for name in ("loss", "accuracy"):
        assert found["evaluated"][name] == pytest.approx(expected["evaluated"][name], rel=1e-5)


def test_the_mask_of_a_nested_model_is_expected_where_its_symbolic_output_has_none():
    layers = keras.layers
    inner = keras.Sequential([keras.Input((3, 4)), layers.Dense(4)])
    model = keras.Sequential([keras.Input((3,)), layers.Embedding(5, 4, mask_zero=True), inner, layers.Dense(2)])
    assert masks.of(model(tf.ones([1, 3]))) is not None
    assert any(masks.begins_at(layer) for layer in model._flatten_layers())
    assert not any(masks.begins_at(layer) for layer in inner._flatten_layers())


def test_an_example_of_padding_alone_counts_nothing():
    values = tf.constant([[1.0, 2.0], [8.0, np.nan], [np.inf, 3.0]])
    mask = tf.constant([[True, True], [True, False], [False, False]])
    np.testing.assert_allclose(masks.by_example(values, mask), [3.0, 8.0, 0.0])  # 3 positions of 3 examples
    np.testing.assert_allclose(masks.by_example(values[:1], mask[2:]), [0.0])
