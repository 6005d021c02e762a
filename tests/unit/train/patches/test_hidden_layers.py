"""Checkpoints of a script have the layers that Keras 3 hides from TensorFlow in lists, dictionaries and sets."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.layer import TFLayer

from train.patches import hidden_layers

layers = keras.layers


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(3), layers.BatchNormalization()]
        self.heads = {"one": [layers.Dense(2)]}
        self.blocks_1 = layers.Dense(3)
        self.others = {layers.Dense(4, trainable=False)}

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        for layer in (*self.others, *self.blocks, self.blocks_1, *self.heads["one"]):
            inputs = layer(inputs)
        return inputs


@pytest.fixture
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TFLayer, "_trackable_children", hidden_layers._children)
    monkeypatch.setattr(layers.Layer, "_lock_state", hidden_layers._lock_state)


def restored(folder: Path) -> list[bool]:
    """Save a model and restore it in another build; return which weights are those that were saved."""
    first, second = Model(), Model()
    for model in (first, second):
        model(tf.ones([1, 5]))
    for weight in first.weights:
        weight.assign(np.random.default_rng(0).uniform(1, 2, weight.shape))
    path = tf.train.Checkpoint(model=first).write(str(folder / "ckpt"))
    tf.train.Checkpoint(model=second).read(path).expect_partial()
    return [np.array_equal(one, other) for one, other in zip(first.get_weights(), second.get_weights(), strict=True)]


def test_keras_itself_leaves_them_out(tmp_path: Path) -> None:
    """Once this fails, Keras has fixed it: remove the patch."""
    assert sum(restored(tmp_path)) == 2  # of the only layer outside of collections


@pytest.mark.usefixtures("_patched")
def test_checkpoints_have_layers_in_collections(tmp_path: Path) -> None:
    assert all(restored(tmp_path))


class Late(layers.Layer):
    def build(self, input_shape: tuple[int, ...]) -> None:
        self.parts = [self.add_weight(input_shape, "random_normal")]


@pytest.mark.usefixtures("_patched")
def test_a_layer_that_is_built_later_is_restored(tmp_path: Path) -> None:
    first, second = Late(), Late()
    first.build((5,))
    tf.train.Checkpoint(second).read(tf.train.Checkpoint(first).write(str(tmp_path / "ckpt")))
    second.build((5,))
    assert np.array_equal(first.get_weights(), second.get_weights())


@pytest.mark.usefixtures("_patched")
def test_other_models_are_saved_as_before() -> None:
    for layer in keras.Sequential([keras.Input([4]), keras.Sequential([layers.Dense(3)])])._flatten_layers():
        assert [*layer._trackable_children()] == [*hidden_layers._keras_children(layer)]
