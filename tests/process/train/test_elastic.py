"""Training on virtual shards: the same bits on any number of replicas, and the right ones."""

import dataclasses
import hashlib
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.small_training import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    OBJECTIVE,
    SEED,
    per_replica,
    prepare,
    strategy_called,
)
from train import patches
from train.data import sources
from train.elastic.exact_sum import exact_sum
from train.elastic.shard_step import ElasticTrainStep
from train.elastic.virtual_shards import VirtualShards
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model.gradients import GradientPolicy
from train.saving.weights import weights_sha256

DEVICES = 3
SHARDS, STEPS = 4, 6
WHERES = ("one", "central-2", "mirrored-3")
"""1 replica with 4 shards; 2 with 2; 3, of which one has 2."""


class Counting(keras.layers.Layer):
    """Counts its calls in whole numbers and in fractions, and keeps a number that never changes."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.fixed = self.add_weight(shape=(2,), initializer=lambda *_, **__: [1e30, 1.1], trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


def new_model(kind: str) -> keras.Model:
    """Return a model whose weights are always the same: `plain`, or with all that replicas would disagree on."""
    keras.utils.set_random_seed(SEED)
    layers, l2 = keras.layers, keras.regularizers.L2(0.05)
    more = [layers.BatchNormalization(momentum=0.5), Counting(), layers.Dropout(0.5)] if kind == "whole" else []
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=l2)
    return keras.Sequential([keras.Input((FEATURES,)), hidden, *more, layers.Dense(CLASSES)])


def trained(where: str, kind: str, source: sources.Source, virtual: bool = True) -> dict[str, Any]:
    """Train for some steps; return the losses and scores, and hashes of all that was trained."""
    strategy = strategy_called(where)
    with strategy.scope():
        model = new_model(kind)
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    replicas = strategy.num_replicas_in_sync
    what = (model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH)
    shards = VirtualShards(SHARDS, replicas)
    train_step = ElasticTrainStep(*what, SHARDS, shards=shards) if virtual else TrainStep(*what, replicas)
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED, shards if virtual else None)
    result = steps.SynchronousSteps(strategy, train_step, feed, STEPS)(0, STEPS)
    fixed = model.non_trainable_variables
    others = [np.ascontiguousarray(variable.numpy()).tobytes() for variable in [*fixed, *optimizer.variables]]
    return {
        "losses": result.losses.tolist(),
        "scores": result.values["accuracy"].tolist(),
        "weights": [variable.numpy().tolist() for variable in model.trainable_variables],
        "weights_sha256": weights_sha256(model),
        "others_sha256": hashlib.sha256(b"".join(others)).hexdigest(),
        "averages": [v.numpy().tolist() for v in fixed if "moving" in v.path],
        "fixed": [v.numpy().tolist() for v in fixed if v.shape == (2,) and v.dtype == "float32"],
    }


def summed(where: str, numbers_VN: np.ndarray) -> list[str]:
    """Return the exact sum of shards that lie on the replicas of a strategy, as hexadecimal float64."""
    strategy = strategy_called(where)
    shards = VirtualShards(len(numbers_VN), strategy.num_replicas_in_sync)

    def replica(number: tf.Tensor, _step: tf.Tensor) -> tf.Tensor:
        own_nN = tf.ensure_shape(tf.gather(tf.constant(numbers_VN), shards.of(number)), [None, numbers_VN.shape[1]])
        return exact_sum([own_nN], shards.total)[0]

    return [value.hex() for value in per_replica(strategy, replica)(0)[0]]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, tuple[str, sources.Source]]:
    """A model and the data that it is trained on: from arrays, or `read` by an iterator."""
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    prepared = prepare(tmp_path_factory.mktemp("data"))
    read = dataclasses.replace(prepared["own:weighted"], arrays=None)
    return {
        "plain": ("plain", prepared["own:plain"]),
        "whole": ("whole", prepared["own:weighted"]),
        "read": ("whole", read),
    }


@pytest.fixture(scope="module")
def alone(kinds) -> dict[str, Any]:
    """What one replica comes to."""
    return trained("one", *kinds["whole"])


@pytest.mark.parametrize(("kind", "where"), [("whole", "central-2"), ("whole", "mirrored-3"), ("read", "mirrored-3")])
def test_any_number_of_replicas_must_give_the_same_bits(alone, kinds, kind, where):
    """Weights, slots, moving averages, losses, scores: from arrays and from an iterator, shared evenly or not."""
    assert alone == trained(where, *kinds[kind])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "whole", "read"])
def test_any_number_of_replicas_must_give_the_same_bits_of_everything(kinds, kind):
    one, *others = (trained(where, *kinds[kind]) for where in WHERES)
    assert [one] * len(others) == others


def test_the_numbers_must_be_those_of_a_plain_training(kinds):
    """Within rounding: virtual shards change the order of sums and nothing else."""
    plain, elastic = (trained("one", *kinds["plain"], virtual=virtual) for virtual in (False, True))
    np.testing.assert_allclose(elastic["losses"], plain["losses"], rtol=1e-6)
    np.testing.assert_allclose(elastic["scores"], plain["scores"], rtol=1e-6)
    for one, other in zip(elastic["weights"], plain["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_moving_averages_must_move_and_what_is_fixed_must_stay(alone):
    mean, variance = alone["averages"]
    assert all(value != 0 for value in mean)
    assert all(0 < value != 1 for value in variance)
    assert [np.array([1e30, 1.1], np.float32).tolist()] == alone["fixed"]


def test_sums_must_be_exact_and_the_same_wherever_the_shards_lie():
    """To within the grid: 2**-36 of the largest number, which 24 orders of magnitude put to the test."""
    random = np.random.default_rng(1)
    shards = (random.normal(size=(7, 50)) * 10.0 ** random.integers(-12, 12, (7, 50))).astype(np.float32)
    sums = [summed(where, shards) for where in WHERES]
    assert [sums[0]] * 3 == sums
    grid = 2.0**-58 * 2 ** math.ceil(math.log2(np.abs(shards).max()))
    exact = [math.fsum(column) for column in shards.astype(np.float64).T]
    np.testing.assert_allclose([float.fromhex(text) for text in sums[0]], exact, rtol=0, atol=len(shards) * grid)
