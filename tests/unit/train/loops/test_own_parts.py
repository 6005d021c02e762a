"""A language model and metrics of the user's own: tried before anything starts, trained and evaluated."""

import argparse
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.data import sources
from train.data.batches import BatchSlice
from train.data.prepare import preparation
from train.loops import fit, steps
from train.loops.train_step import TrainStep
from train.model import models, objectives, optimizers
from train.settings.optimization import Optimizer
from train.startup import preflight

T, V = 6, 5


def data() -> dict[str, Any]:
    """Return sequences that count up from a random token: int32, with a label for every position."""
    starts_N = np.random.default_rng(0).integers(0, V, 48)
    tokens_NT = ((starts_N[:, None] + np.arange(T + 1)) % V).astype(np.int32)
    split = tokens_NT[:, :-1], tokens_NT[:, 1:]
    return {"train": split, "test": split, "classes": [str(token) for token in range(V)]}


def model(feature_shape: tuple[int, ...], vocabulary: int) -> keras.Model:
    """Return a model whose embedding refuses anything but whole numbers."""
    tokens = keras.Input(feature_shape, dtype="int32")
    values = keras.layers.Embedding(vocabulary, 8)(tokens)
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(values))


def metrics() -> dict[str, Any]:
    """Return functions to booleans and whole numbers, which Keras averages as well."""

    def last_right(labels_BT: tf.Tensor, logits_BTV: tf.Tensor) -> tf.Tensor:
        return tf.argmax(logits_BTV[:, -1], -1) == labels_BT[:, -1]

    def twos(labels_BT: tf.Tensor, _logits_BTV: tf.Tensor) -> tf.Tensor:
        return 2 * tf.ones(tf.shape(labels_BT)[0], tf.int32)

    return {"last_right": last_right, "twos": twos}


class OwnStep(keras.Model):
    """Overrides `train_step`."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.fixture
def own(monkeypatch) -> ModuleType:
    """The user's module `own_words`."""
    module = ModuleType("own_words")
    vars(module).update(data=data, model=model, metrics=metrics)
    monkeypatch.setitem(sys.modules, "own_words", module)
    return module


def config(**more: Any) -> TrainConfig:
    named = {"dataset": "own_words:data", "model": "own_words:model", "metrics": "own_words:metrics"}
    optimizer = Optimizer(learning_rate=0.1, warmup_steps=0)
    return TrainConfig(**named | {"global_batch": 12, "optimizer": optimizer} | more).check()


@pytest.mark.usefixtures("own")
def test_a_language_model_is_tried_trained_and_evaluated_by_metrics_of_its_own(tmp_path):
    preparation.prepare("own_words:data", tmp_path)
    options = argparse.Namespace(data_dir=tmp_path, stages=0, strategy="one", replicas=1)
    preflight.check(config(), options)
    source, strategy = sources.find(config(), tmp_path), tf.distribute.OneDeviceStrategy("/CPU:0")
    objective = objectives.of(config(), classifies=True, predicts_text=False)
    with strategy.scope():
        built = models.of(config(), source.feature_shape, source.num_outputs)
        policy = optimizers.policy(config(), optimizers.build_for(config(), built))
    train_step = TrainStep(built, policy, objective, 12, 1)
    feed = sources.train_feed(strategy, source, 0, 12, 7)
    losses = steps.SynchronousSteps(strategy, train_step, feed, 40)(0, 40).losses
    assert losses[0] == pytest.approx(math.log(V), rel=0.1)
    assert losses[-1] < 0.1
    results = steps.evaluation(
        strategy, built, objective, sources.eval_feed(strategy, source, 10), num_examples=48, batch=10
    )()
    assert {"eval_loss", "eval_accuracy", "eval_last_right", "eval_twos"} == set(results)
    assert set(objective.evaluated) == set(results)
    assert (1.0, 1.0, 2.0) == tuple(results[f"eval_{name}"] for name in ("accuracy", "last_right", "twos"))


@pytest.mark.parametrize("made", [None, {}, {"Upper": abs}, {"twos": 2}, {"accuracy": abs}])
def test_invalid_metrics_are_refused(own, made):
    vars(own)["metrics"] = lambda: made
    with pytest.raises(UsageError, match="^--metrics 'own_words:metrics'"):
        objectives.of(config(), classifies=True, predicts_text=False)


def test_a_compile_that_fit_cannot_call_is_refused(own):
    class Generative(keras.Model):
        def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
            super().compile(d_optimizer)

    def generative(shape: tuple[int, ...], outputs: int) -> keras.Model:
        plain = model(shape, outputs)
        return Generative(plain.inputs[0], plain.outputs[0])

    vars(own)["model"] = generative
    with pytest.raises(UsageError, match="Generative"):
        models.of(config(loop="fit"), (T,), V)
    assert isinstance(models.of(config(), (T,), V), Generative)


def test_a_train_step_that_would_not_be_called_is_refused(own):
    def stepping(shape: tuple[int, ...], outputs: int) -> keras.Model:
        plain = model(shape, outputs)
        return OwnStep(plain.inputs[0], plain.outputs[0])

    vars(own)["model"] = stepping
    with pytest.raises(UsageError, match="--loop fit"):
        models.of(config(), (T,), V)
    assert isinstance(models.of(config(loop="fit"), (T,), V), OwnStep)


@pytest.mark.usefixtures("own")
def test_fit_gives_the_loss_and_the_score_of_the_custom_loop_on_tokens(tmp_path):
    preparation.prepare("own_words:data", tmp_path)
    source = sources.find(config(), tmp_path)
    objective = objectives.of(config(metrics=""), classifies=True, predicts_text=False)
    keras.utils.set_random_seed(1)
    built = models.of(config(loop="fit"), source.feature_shape, source.num_outputs)
    given: Any = SimpleNamespace(objective=objective, source=source, config=config())
    built.compile(keras.optimizers.SGD(0.0), **fit._compiled(given))
    batches = source.train_dataset(BatchSlice(12, 7, num_steps=1))
    logs = built.fit(batches.map(lambda batch: (batch.features, batch.labels)), verbose=0).history
    batch = next(iter(batches))
    outputs = built(batch.features)
    assert float(np.mean(objective.loss(batch.labels, outputs))) == pytest.approx(logs["loss"][0], rel=1e-6)
    assert float(np.mean(objective.score(batch.labels, outputs))) == pytest.approx(logs["accuracy"][0])
