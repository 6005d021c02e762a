"""`--loop fit` on two devices of one process: the numbers of one device, and of no disturbance."""

import dataclasses
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.spec import build
from cluster.system.json_files import read_json, read_json_lines
from tests.support.tracking import Tracking
from train import patches
from train.config import Optimizer, TrainConfig
from train.context import TaskContext
from train.data import (
    arrays,
    sources,
)
from train.loops import fit
from train.model import objectives

DEVICES = 2
EXAMPLES, FEATURES, CLASSES, STEPS = 40, 6, 3, 13
CONFIG = TrainConfig(
    dataset="own:weighted",
    callbacks="own_callbacks:made",
    loop="fit",
    global_batch=12,
    epochs=100,
    max_steps=STEPS,
    log_every=1,
    steps_per_loop=1,
    checkpoint_every=3,
    optimizer=Optimizer("adam", 0.01, warmup_steps=0),
)


class Killed(Exception):
    """In place of a signal."""


class Kill(keras.callbacks.Callback):
    """Raises once `left` batches have begun: of the class, since a restart restores the attributes of an instance."""

    left = 1000

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        type(self).left -= 1
        if self.left < 0:
            raise Killed


def prepare(data_dir: Path) -> None:
    """Write random weighted examples."""
    random = np.random.default_rng(0)
    parts = (
        random.normal(2, 3, size=(EXAMPLES, FEATURES)).astype(np.float32),
        random.integers(0, CLASSES, EXAMPLES),
        random.uniform(0, 3, EXAMPLES).astype(np.float32),
    )
    arrays.write(data_dir, CONFIG.dataset, "1", {"train": parts, "test": parts})


def new_model(dropout: float, *, plain: bool = False) -> keras.Model:
    """Return a small model with what replicas would disagree on, unless it is plain."""
    keras.utils.set_random_seed(7)
    layers = keras.layers
    if plain:
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)])
    inner = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(momentum=0.5)])
    hidden = [layers.Dense(8, activation="tanh"), inner, Tracking(), layers.Dropout(dropout)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])


def train(
    folder: Path, strategy: tf.distribute.Strategy, dropout: float = 0.0, *, plain: bool = False, **values: Any
) -> dict[str, Any]:
    """Start or resume a training; return its results."""
    run, spec = RunFolder(folder / "run"), build(workers=0)
    if not run.path.exists():
        run.create()
    config = dataclasses.replace(CONFIG, **values)
    source = sources.find(config, folder.parent / "data")
    with strategy.scope():
        model = new_model(dropout, plain=plain)
    context = TaskContext(
        run=run,
        task=spec.task("chief"),
        spec=spec,
        config=config,
        source=source,
        objective=objectives.build(config.loss, classifies=True),
        strategy=strategy,
        model=model,
        new_model=lambda: new_model(dropout, plain=plain),
        heartbeat=HeartbeatWriter(run, spec.task("chief"), 0),
        stop=threading.Event(),
    )
    fit.train(context)
    rows = [row for row in read_json_lines(run.metrics("chief")) if "loss" in row]
    return {
        "weights_sha256": read_json(run.control / "result.json")["weights_sha256"],
        "weights": [variable.numpy().tolist() for variable in model.variables],
        "loss": [row["loss"] for row in rows],
        "accuracy": [row["accuracy"] for row in rows],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    own = types.ModuleType("own_callbacks")
    own.made = lambda run, task: [Kill()]
    own.clipped = lambda rate: keras.optimizers.Adam(rate, global_clipnorm=0.05)
    sys.modules["own_callbacks"] = own
    made = tmp_path_factory.mktemp("fit")
    prepare(made / "data")
    return made


@pytest.fixture(scope="module")
def one() -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy("/CPU:0")


@pytest.fixture(scope="module")
def two() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])


def test_two_devices_give_the_numbers_of_one(folder, one, two):
    """Weights, moving averages and other state of layers, losses, with an optimizer that clips."""
    clipped = dataclasses.replace(CONFIG.optimizer, name="own_callbacks:clipped")
    first, second = (train(folder / str(at), each, optimizer=clipped) for at, each in enumerate((one, two)))
    for expected, actual in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(second["loss"], first["loss"], rtol=1e-5)


def test_a_training_that_is_killed_inside_of_epochs_ends_with_the_same_bits(folder, two, monkeypatch):
    """With dropout, BatchNormalization and Adam, twice over."""
    whole, plain = train(folder / "whole", two, 0.5), train(folder / "no-dropout", two)
    for after in (2, 5):
        monkeypatch.setattr(Kill, "left", after)
        with pytest.raises(Killed):
            train(folder / "killed", two, 0.5)
    monkeypatch.undo()
    killed = train(folder / "killed", two, 0.5)
    assert whole["weights_sha256"] == killed["weights_sha256"] != plain["weights_sha256"]
    assert whole["weights"] == killed["weights"]  # moving averages too
    np.testing.assert_allclose(killed["loss"], whole["loss"], rtol=1e-4)


def test_training_accuracy_is_not_weighted(folder, two):
    """As in the custom loop, and as everywhere in evaluation."""
    still = Optimizer("sgd", 0.0, warmup_steps=0, momentum=0.0)
    (logged,) = train(folder / "weighted", two, global_batch=EXAMPLES, max_steps=1, optimizer=still)["accuracy"]
    split = sources.find(CONFIG, folder / "data").arrays.train
    features = np.fromfile(split.features.path, np.float32).reshape(split.features.shape)
    labels, weights = np.fromfile(split.labels.path, np.int64), np.fromfile(split.weights.path, np.float32)
    right = np.argmax(new_model(0.0)(features, training=True), -1) == labels
    assert logged == np.float32(right.mean()) != np.float32(np.average(right, weights=weights))


def test_micro_batches_accumulate_as_in_the_custom_loop(folder, one, two):
    """On one device and on two."""
    whole = train(folder / "cut-whole", one, plain=True, callbacks="")
    for name, strategy in (("one", one), ("two", two)):
        cut = train(folder / f"cut-{name}", strategy, micro_batches=3, plain=True, callbacks="")
        for actual, expected in zip(cut["weights"], whole["weights"], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        for metric in ("loss", "accuracy"):
            np.testing.assert_allclose(cut[metric], whole[metric], rtol=1e-4)
