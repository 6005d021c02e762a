"""Defects of Keras 3 under tf.distribute, and their patches in `train/patches/`.

Each test of a patch fails without it; each test of "Keras itself" fails once the defect is fixed. Those of parameter
servers are in `test_parameter_server.py`.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.small_training import (
    CLASSES,
    FEATURES,
    PLAIN,
    SEED,
    new_model,
    per_replica,
    prepare,
    strategy_called,
    training,
)
from train import patches
from train.data import sources
from train.patches import batch_normalization, placed_seeds

DEVICES = 2
STEPS, RATE = 3, 0.1
WHERES = ("mirrored-2", "central-2")


def counters() -> dict[str, Any]:
    """Return a metric's and an optimizer's counts under CentralStorageStrategy: 3 steps, examples of 1 and 3."""
    strategy = strategy_called("central-2")
    with strategy.scope():
        mean = keras.metrics.Mean()
        model = new_model(0)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)

    def count(replica: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        mean.update_state(1 + 2 * tf.cast(replica, tf.float32))
        gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        return step

    run = per_replica(strategy, count)
    for step in range(3):
        run(step)
    return {
        "total": float(mean.total.numpy()),
        "count": float(mean.count.numpy()),
        "iterations": int(optimizer.iterations.numpy()),
    }


class Block(keras.layers.Layer):
    """Has a BatchNormalization inside, as blocks of a residual network have."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = keras.layers.BatchNormalization(momentum=0.5)

    def build(self, shape: tuple[int, ...]) -> None:
        self.normal.build(shape)
        self.built = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.normal(inputs, training=training)


def normalizing() -> keras.Model:
    """Return a model with BatchNormalization layers on the surface, in a model and in a layer."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    inner = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.5)])
    first = layers.BatchNormalization(momentum=0.5)
    return keras.Sequential([keras.Input((FEATURES,)), first, layers.Dense(4), inner, Block(), layers.Dense(CLASSES)])


def normalized(name: str, found: dict[str, sources.Source]) -> dict[str, Any]:
    """Train it; return the results."""
    return training(name, found["own:plain"], PLAIN, model_of=normalizing).trained()


def normalized_by_mask(name: str) -> list[Any]:
    """Return BatchNormalization's outputs for four examples, the first of which have less padding, and gradients."""
    strategy = strategy_called(name)
    replicas, random = strategy.num_replicas_in_sync, np.random.default_rng(SEED)
    values, weights = (random.normal(size=(replicas, 4 // replicas, 3, 2)).astype(np.float32) for _ in range(2))
    masks = (np.arange(3) < np.array([[3], [3], [2], [1]])).reshape(replicas, 4 // replicas, 3)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer.build((None, 3, 2))

    def normalize(replica: tf.Tensor, _step: tf.Tensor) -> tf.Tensor:
        own = tf.constant(values)[replica]
        with tf.GradientTape() as tape, keras.StatelessScope():
            tape.watch(own)
            outputs = layer(own, training=True, mask=tf.constant(masks)[replica])
            loss = tf.reduce_sum(tf.square(outputs) * tf.constant(weights)[replica])
        return tf.stack([outputs, tape.gradient(loss, own)], 1)

    return [example for of_replica in per_replica(strategy, normalize)(0) for example in of_replica]


def dropped(name: str) -> dict[str, Any]:
    """Return which units Dropout keeps, by step and replica, and the state of its generator before and after.

    At the steps 0, 1 and 0 again; of two layers, the second called twice.
    """
    strategy = strategy_called(name)
    with strategy.scope():
        first, second = (keras.layers.Dropout(0.5, seed=seed) for seed in (1, 2))
    ones = tf.ones([1, 32])
    state = [layer.seed_generator.state.numpy().tolist() for layer in (first, second)]

    def draw(replica: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        with placed_seeds.random_place(step, replica):
            return tf.concat([layer(ones, training=True) for layer in (first, second, second)], 0) > 0

    run = per_replica(strategy, draw)
    try:
        kept = [run(step) for step in (0, 1, 0)]
    except ValueError as error:
        return {"error": str(error)}
    after = [layer.seed_generator.state.numpy().tolist() for layer in (first, second)]
    return {"kept": kept, "state": state, "state_after": after}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, sources.Source]:
    return prepare(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def traps(prepared) -> dict[str, Any]:
    """What Keras comes to before it is patched."""
    computed: dict[str, Any] = {"counters": counters(), "dropout": {name: dropped(name) for name in WHERES}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_normalization, "synchronize_batch_normalization", lambda *_: 0)
        computed["normalized"] = normalized("mirrored-2", prepared)
    computed["by_mask"] = normalized_by_mask("mirrored-2")
    patches.apply()
    return computed


@pytest.fixture(scope="module")
def normalized_alone(traps, prepared) -> dict[str, Any]:
    """What one device comes to with BatchNormalization."""
    return normalized("one", prepared)


# CentralStorageStrategy


def test_replicas_that_share_a_metric_each_count_once(traps):
    """Three steps of two replicas, one of which sees 1 and the other 3."""
    assert {"total": 12, "count": 6, "iterations": 3} == counters()


def test_keras_itself_counts_the_others_count_again(traps):
    assert traps["counters"]["count"] > 6


# BatchNormalization


@pytest.mark.parametrize("where", WHERES)
def test_moving_averages_are_those_of_the_whole_batch(normalized_alone, prepared, where):
    """Of a layer on the surface, of one inside a model, and of one inside a layer."""
    one, replicas = normalized_alone, normalized(where, prepared)
    assert 6 == len(one["averages"])
    for expected, actual in zip(one["averages"], replicas["averages"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(replicas["losses"], one["losses"], rtol=1e-5)


def test_replicas_themselves_normalise_over_their_own_examples(traps, normalized_alone):
    """The variances of parts, whose mean is not that of the whole batch."""
    expected, actual = normalized_alone["averages"][1], traps["normalized"]["averages"][1]
    assert np.abs(np.subtract(expected, actual)).max() > 0.01


@pytest.mark.parametrize("where", WHERES)
def test_masked_positions_are_left_out_over_the_whole_batch(traps, where):
    """And so are their gradients: where replicas hold different numbers of them."""
    np.testing.assert_allclose(normalized_by_mask(where), normalized_by_mask("one"), rtol=1e-5, atol=1e-5)


def test_keras_itself_leaves_them_out_by_replica(traps):
    assert np.abs(np.subtract(normalized_by_mask("one"), traps["by_mask"])).max() > 0.01


# Dropout


@pytest.mark.usefixtures("traps")
@pytest.mark.parametrize("where", WHERES)
def test_replicas_drop_different_units_which_follow_from_seed_step_and_replica(where):
    drawn = dropped(where)
    kept = np.array(drawn["kept"])  # [step 0, 1, 0 again; replica; layer 1, layer 2, layer 2 again; units]
    assert (3, 2, 3, 32) == kept.shape
    np.testing.assert_array_equal(kept[0], kept[2])
    masks = {mask.tobytes() for mask in kept[:2].reshape(-1, 32)}
    assert 12 == len(masks)  # two steps, two replicas, three draws: each its own
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_array_equal(dropped("one")["kept"][0][0], kept[0][0])
    assert drawn["state"] == drawn["state_after"]


def test_keras_itself_drops_the_same_units_on_every_replica(traps):
    kept = np.array(traps["dropout"]["mirrored-2"]["kept"])
    np.testing.assert_array_equal(kept[:, 0], kept[:, 1])
    assert (kept[0] != kept[2]).any()  # and other ones when the step is done again


def test_central_storage_itself_refuses_dropout(traps):
    assert "You must specify an aggregation method" in traps["dropout"]["central-2"]["error"]
