"""What `--loop fit` gives on two devices of one process."""

import dataclasses
import json
import shutil
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np

from train import strategy as strategies

strategies.configure_devices(2)

import tensorflow as tf  # noqa: E402
from tensorflow import keras  # noqa: E402

from cluster.contract.run.folder import RunFolder  # noqa: E402
from cluster.contract.run.heartbeat import HeartbeatWriter  # noqa: E402
from cluster.contract.spec import build  # noqa: E402
from cluster.system.journal import read_json_lines  # noqa: E402
from cluster.system.json_files import read_json  # noqa: E402
from tests.unit.measure.tracking import Tracking  # noqa: E402
from train import patches  # noqa: E402
from train.config import Optimizer, TrainConfig  # noqa: E402
from train.context import TaskContext  # noqa: E402
from train.data import (  # noqa: E402
    arrays,
    sources,
)
from train.loops.keras_fit import fit  # noqa: E402
from train.model import objectives  # noqa: E402

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
    (data_dir / "scratch").mkdir(parents=True)
    where = data_dir / "scratch", data_dir, CONFIG.dataset, "1"
    arrays.write(*where, classes=(), splits={"train": parts, "test": parts}, source="", source_files={})


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
    fit.Training(context).run()
    return {
        "weights_sha256": read_json(run.control / "result.json")["weights_sha256"],
        "weights": [variable.numpy().tolist() for variable in model.variables],
        "rows": [row for row in read_json_lines(run.metrics("chief")) if "loss" in row],
    }


def resumed(folder: Path, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Return the results of a training without interruption, and of one that is killed twice within epochs."""
    whole = train(folder / "whole", strategy, 0.5)
    sys.modules["own_callbacks"].made = lambda run, task: [Kill()]  # type: ignore[attr-defined]
    for after in (2, 5):
        Kill.left = after
        try:
            train(folder / "killed", strategy, 0.5)
        except Killed:
            continue
        raise AssertionError("was not killed")
    Kill.left = 1000
    return {"whole": whole, "killed": train(folder / "killed", strategy, 0.5)}


def in_micro_batches(folder: Path, one: tf.distribute.Strategy, two: tf.distribute.Strategy) -> dict[str, Any]:
    """Return the results of trainings in three micro-batches, and the error classes of two that are refused."""
    cut: dict[str, Any] = {"micro_batches": 3, "plain": True, "callbacks": ""}
    try:
        train(folder / "cut-normalized", two, micro_batches=3)
    except Exception as error:  # whatever it is
        refused = type(error).__name__
    return {
        "whole": train(folder / "cut-whole", one, plain=True, callbacks=""),
        "one": train(folder / "cut-one", one, **cut),
        "two": train(folder / "cut-two", two, **cut),
        "refused": refused,
    }


def weighted(folder: Path, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Return the accuracy that is logged of a step on all examples, and the plain mean it is meant to be."""
    values = {
        "global_batch": EXAMPLES,
        "max_steps": 1,
        "optimizer": Optimizer("sgd", 0.0, warmup_steps=0, momentum=0.0),
    }
    logged = train(folder / "weighted", strategy, **values)["rows"][0]["accuracy"]
    split = sources.find(CONFIG, folder / "data").arrays.train
    features = np.fromfile(split.features.path, np.float32).reshape(split.features.shape)
    labels = np.fromfile(split.labels.path, np.int64)
    weights = np.fromfile(split.weights.path, np.float32)
    right = np.argmax(new_model(0.0)(features, training=True), -1) == labels
    return {"logged": logged, "mean": float(right.mean()), "weighted": float(np.average(right, weights=weights))}


def main(result: Path) -> None:
    """Measure."""
    tf.config.experimental.enable_op_determinism()
    own = types.ModuleType("own_callbacks")
    own.made = lambda run, task: [Kill()]  # type: ignore[attr-defined]
    own.clipped = lambda rate: keras.optimizers.Adam(rate, global_clipnorm=0.05)  # type: ignore[attr-defined]
    sys.modules["own_callbacks"] = own
    clipped = dataclasses.replace(CONFIG.optimizer, name="own_callbacks:clipped")
    folder = Path(tempfile.mkdtemp())
    prepare(folder / "data")
    one, two = tf.distribute.OneDeviceStrategy("/CPU:0"), tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    patches.apply()
    found = {
        "one": train(folder / "one", one, optimizer=clipped),
        "two": train(folder / "two", two, optimizer=clipped),
        "resumed": resumed(folder, two),
        "weighted": weighted(folder, two),
        "micro_batches": in_micro_batches(folder, one, two),
    }
    shutil.rmtree(folder)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
