"""The weights of a checkpoint, loaded into a model that computes in another precision than the training."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from train import patches
from train.pipeline import stage_variables
from train.saving import saved_weights
from train.strategy import precision_policy

patches.apply()


def new_model() -> keras.Model:
    """Return a model in which a lower precision adds a cast before the mask, so that Keras counts one layer more."""
    inputs = keras.Input((5, 3))
    hidden = keras.layers.LSTM(8, return_sequences=True)(keras.layers.Masking()(inputs))
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(8)(hidden))
    return keras.Model(inputs, keras.layers.Dense(8)(pooled))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("without_memory", [False, True])
def test_weights_trained_in_another_precision_are_loaded(tmp_path, precision, without_memory):
    with precision_policy(precision):
        trained = new_model()
    prefix = tf.train.Checkpoint(model=trained).write(str(tmp_path / "ckpt"))
    model = stage_variables.to_restore(new_model) if without_memory else new_model()
    saved_weights.load_trained(model, prefix, stage_variables.as_trained(new_model, precision))
    for expected, loaded in zip(trained.weights, model.weights, strict=True):  # without states of random generators
        np.testing.assert_array_equal(expected.numpy(), loaded.numpy())
