"""Weights to begin with: from every kind of file, by name and shape, with one line about what did not match."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from cluster.system.files import ROOT
from tests.support import own_module
from train import patches
from train.config import TrainConfig
from train.model import initial_weights, models, optimizers
from train.pipeline import stage_models
from train.saving import saved_weights
from train.saving.checkpoint import CheckpointManager
from train.strategy import precision_policy


def new_model(outputs: int = 2, *, seed: int = 0) -> keras.Model:
    """Return a model whose layers are named, two of them inside of another one."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    body = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="wide"), layers.Dropout(0.1)], name="body")
    return keras.Sequential(
        [keras.Input((4,)), body, layers.BatchNormalization(name="norm"), layers.Dense(outputs, name="head")]
    )


def save(kind: str, model: keras.Model, folder: Path) -> Path:
    folder.mkdir()
    if kind == ".index":
        optimizer = optimizers.build_for_model(TrainConfig(), model)
        saves = CheckpointManager(model, optimizer, tf.Variable(0, dtype=tf.int64), folder, keep=1, writes=True)
        saves.save(3)
        saves.wait()
    elif kind == ".npz":
        weights = {name: variable.numpy() for variable, name in initial_weights.list_weights(model)}
        np.savez(folder / "weights.npz", **weights)
    elif kind == ".weights.h5":
        model.save_weights(folder / "model.weights.h5")
    else:
        model.save(folder / f"model{kind}")
    path = initial_weights.find_file(folder)
    assert path is not None
    return path


class Autoencoder(keras.Model):
    """A subclassed model of two functional ones, as in keras.io's VAE."""

    def __init__(self):
        super().__init__()
        inputs, code = keras.Input((4,)), keras.Input((2,))
        self.encoder = keras.Model(inputs, keras.layers.Dense(2, name="code")(inputs), name="encoder")
        self.decoder = keras.Model(code, keras.layers.Dense(4, name="image")(code), name="decoder")

    def call(self, inputs):
        return self.decoder(self.encoder(inputs))


OF_KERAS = [".weights.h5", ".keras"]


@pytest.mark.parametrize(
    ("new", "kind"),
    [(Autoencoder, kind) for kind in OF_KERAS] + [(new_model, kind) for kind in (".index", ".npz", ".h5", *OF_KERAS)],
)
def test_all_weights_are_taken_from(tmp_path, new, kind):
    first, second = new(), new()
    first(np.zeros((1, 4)))
    first.set_weights([weight + 1 for weight in first.get_weights()])
    line = initial_weights.load_file(second, save(kind, first, tmp_path / "init"))
    assert line.startswith(f"began with {len(first.weights)} of the {len(first.weights)} weights from ")
    assert ";" not in line
    np.testing.assert_equal(first.get_weights(), second.get_weights())


class Counts(keras.layers.Layer):
    """Has a whole number before other state, and an adapted layer."""

    def __init__(self) -> None:
        super().__init__(name="counts")
        self.scaled = keras.layers.Normalization(name="scaled")

    def build(self, shape) -> None:
        self.scaled.build(shape)
        for name, dtype in (("calls", "int32"), ("mean", "float32")):
            setattr(self, name, self.add_weight(shape=(), dtype=dtype, trainable=False, name=name))

    def call(self, inputs):
        return self.scaled(inputs) + self.mean + tf.cast(self.calls, inputs.dtype)


@pytest.mark.parametrize("kind", [".index", ".npz", ".weights.h5"])
def test_whole_numbers_and_adapted_layers_are_taken(tmp_path, kind):
    patches.apply()
    first, second, third = (keras.Sequential([keras.Input((2,)), Counts()]) for _ in range(3))
    traced = [tf.function(model) for model in (second, third)]
    for model in traced:
        model(np.ones((1, 2), np.float32))  # as a standby process, before there are values
    first.layers[0].scaled.adapt(np.array([[1.0, 2.0], [5.0, 9.0]]))
    first.layers[0].calls.assign(7)
    assert ";" not in initial_weights.load_file(second, save(kind, first, tmp_path / "init"))
    saved_weights.assign_values(third, saved_weights.read_values(second))  # as for an export
    for loaded in (second, third, *traced):
        np.testing.assert_allclose(first(np.ones((1, 2))), loaded(np.ones((1, 2), np.float32)), rtol=1e-6)


def test_the_table_example_computes_as_trained_once_its_table_has_changed(tmp_path, monkeypatch):
    patches.apply()
    features = np.array([[3.0, 88], [5, 120]], np.float32)

    def built(table: np.ndarray) -> keras.Model:
        own_module.put(monkeypatch, "data", data=lambda: {"train": (table, table[:, 0])})
        return runpy.run_path(str(ROOT / "examples" / "table" / "model.py"))["model"]((2,), 1)

    first, second = built(features), built(features + 7)
    saved_weights.load_trained(second, str(save(".index", first, tmp_path / "init").with_suffix("")))
    np.testing.assert_array_equal(first(features), second(features))


class Repeated(keras.layers.Layer):
    """Builds its layer itself, whose weights are therefore called the same in every such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(4, name="inner")
        self.inner.build((None, 4))

    def call(self, inputs):
        return self.inner(inputs)


def test_weights_of_one_name_are_taken_in_their_order_or_refused(tmp_path):
    first, second = (keras.Sequential([keras.Input((4,)), Repeated(), Repeated()]) for _ in range(2))
    for number, kind in enumerate((".index", ".npz")):
        line = initial_weights.load_file(second, save(kind, first, tmp_path / str(number)))
        assert line.startswith("began with 4 of the 4 weights from ")
        np.testing.assert_equal(first.get_weights(), second.get_weights())
    with pytest.raises(UsageError, match="--init-from model.weights.h5"):
        initial_weights.load_file(second, save(".weights.h5", first, tmp_path / "keras"))


def test_weights_that_do_not_match_stay_random_and_are_named(tmp_path):
    first, second = new_model(seed=1), new_model(outputs=5, seed=2)
    before = second.get_layer("head").kernel.numpy()
    line = initial_weights.load_file(second, save(".npz", first, tmp_path / "init"))
    assert line.startswith("began with 6 of the 8 weights from ")
    assert "head/kernel (3, 5) (in the file (3, 2))" in line
    np.testing.assert_array_equal(before, second.get_layer("head").kernel.numpy())
    wide, theirs = (model.get_layer("body").get_layer("wide").kernel.numpy() for model in (first, second))
    np.testing.assert_array_equal(wide, theirs)


def test_a_file_of_another_model_is_refused(tmp_path):
    other = keras.Sequential([keras.Input((7,)), keras.layers.Dense(9, name="other")])
    with pytest.raises(UsageError, match=r"^--init-from weights\.npz: none of its weights"):
        initial_weights.load_file(new_model(), save(".npz", other, tmp_path / "init"))


@pytest.mark.parametrize("name", ["weights.npz", "model.keras", "model.h5", "ckpt-1.index"])
def test_a_file_that_holds_no_weights_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"no weights")
    with pytest.raises(UsageError, match=f"^--init-from {name}: it cannot be read"):
        initial_weights.load_file(new_model(), tmp_path / name)


@pytest.mark.parametrize(("names", "trained"), [("wide, no*", 2), ("body", 6), ("wide", 4)])
def test_layers_are_frozen_by_a_name_that_several_may_have_or_by_how_they_begin(names, trained):
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="wide")], name="other")
    model = keras.Sequential([keras.Input((4,)), other, *new_model().layers])
    models.freeze_layers(model, names)
    assert trained == len(model.trainable_variables)


@pytest.mark.parametrize("names", ["hea", "wide,*missing", "*"])
def test_a_layer_that_is_not_there_or_the_last_one_is_refused(names):
    with pytest.raises(UsageError, match="--freeze "):
        models.freeze_layers(new_model(), names)


def new_masked_model() -> keras.Model:
    """Return a model in which a lower precision adds a cast before the mask, so that Keras counts one layer more."""
    inputs = keras.Input((5, 3))
    hidden = keras.layers.LSTM(8, return_sequences=True)(keras.layers.Masking()(inputs))
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(8)(hidden))
    return keras.Model(inputs, keras.layers.Dense(8)(pooled))


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("without_memory", [False, True])
def test_weights_trained_in_another_precision_are_loaded(tmp_path, precision, without_memory):
    patches.apply()
    with precision_policy(precision):
        trained = new_masked_model()
    prefix = tf.train.Checkpoint(model=trained).write(str(tmp_path / "ckpt"))
    model = stage_models.to_restore(new_masked_model) if without_memory else new_masked_model()
    saved_weights.load_trained(model, prefix, stage_models.as_trained(new_masked_model, precision))
    for expected, loaded in zip(trained.weights, model.weights, strict=True):  # without states of random generators
        np.testing.assert_array_equal(expected.numpy(), loaded.numpy())
