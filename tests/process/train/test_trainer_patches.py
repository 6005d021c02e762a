"""Defects of Keras 3 under tf.distribute, and their patches in `train/patches/`.

Each test of a patch fails without it; each test of "Keras itself" fails once the defect is fixed. Those of parameter
servers are in `test_parameter_server.py`.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.small_training import SEED, per_replica, strategy_called
from train import patches
from train.patches import batch_normalization, layer_aggregation, placed_seeds

DEVICES = 2
LARGE: dict[str, Any] = {"masked": False, "mean": 2000.0}
"""Numbers such as years."""
WHERES = ("mirrored-2", "central-2")


class Block(keras.layers.Layer):
    """Has a BatchNormalization inside, as blocks of a residual network have."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = keras.layers.BatchNormalization()

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.normal(inputs)


class MaskedCell(keras.layers.SimpleRNNCell):
    """Puts out its dropout mask, after a BatchNormalization at which replicas wait for each other."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.normal = keras.layers.BatchNormalization(synchronized=True)
        self.normal.build(input_shape)

    def call(self, inputs: tf.Tensor, states: list[tf.Tensor], training: bool = False) -> Any:
        return self.get_dropout_mask(inputs) + 0 * self.normal(inputs, training=training), states


def masks_of_cells(name: str) -> Any:
    """Return the dropout masks of an unrolled cell, `[replica, example, step, unit]`."""
    strategy = strategy_called(name)
    with strategy.scope():
        layer = keras.layers.RNN(MaskedCell(16, dropout=0.5, seed=1), return_sequences=True, unroll=True)
        layer.build((1, 3, 16))

    def draw(replica: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        with placed_seeds.random_place(step, replica), keras.StatelessScope():
            return layer(tf.ones([1, 3, 16]), training=True)

    return np.array(per_replica(strategy, draw)(0))


def normalized(name: str, *, synchronized: bool = True, masked: bool = True, mean: float = 0.0) -> list[Any]:
    """Return BatchNormalization's outputs for four examples, the first of which have less padding, and gradients."""
    strategy = strategy_called(name)
    replicas, random = strategy.num_replicas_in_sync, np.random.default_rng(SEED)
    values, weights = (random.normal(size=(replicas, 4 // replicas, 3, 2)).astype(np.float32) for _ in range(2))
    values += np.float32(mean)
    masks = (np.arange(3) < np.array([[3], [3], [2], [1]])).reshape(replicas, 4 // replicas, 3)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(synchronized=synchronized)
        layer.build((None, 3, 2))

    def normalize(replica: tf.Tensor, _step: tf.Tensor) -> tf.Tensor:
        own = tf.constant(values)[replica]
        with tf.GradientTape() as tape, keras.StatelessScope():
            tape.watch(own)
            outputs = layer(own, training=True, mask=tf.constant(masks)[replica] if masked else None)
            loss = tf.reduce_sum(tf.square(outputs) * tf.constant(weights)[replica])
        return tf.stack([outputs, tape.gradient(loss, own)], 1)

    return [example for of_replica in per_replica(strategy, normalize)(0) for example in of_replica]


def dropped(name: str) -> dict[str, Any]:
    """Return which units of two layers Dropout keeps, the second called twice, and their generators' states."""
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
def traps() -> dict[str, Any]:
    """What Keras comes to before it is patched."""
    computed = {"dropout": {name: dropped(name) for name in WHERES}, "by_mask": normalized("mirrored-2")}
    computed["large"] = normalized("mirrored-2", **LARGE)
    patches.apply()
    return computed


def test_layers_on_the_surface_in_a_model_and_in_a_layer_are_synchronized():
    """That the numbers are those of the whole batch: `tests/differential`."""
    inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), inner, Block()])
    layers = [part for part in model._flatten_layers() if isinstance(part, keras.layers.BatchNormalization)]
    for replicas, synchronized in ((2, True), (1, False)):  # 1 with virtual shards, whatever the user has chosen
        batch_normalization.synchronize_batch_normalization(model, replicas)
        assert [synchronized] * 3 == [layer.synchronized for layer in layers]


@pytest.mark.usefixtures("traps")
def test_replicas_themselves_normalise_over_their_own_examples():
    one, parts = (normalized(name, synchronized=False, masked=False) for name in ("one", "mirrored-2"))
    assert np.abs(np.subtract(one, parts)).max() > 0.01


@pytest.mark.parametrize("where", WHERES)
def test_masked_positions_are_left_out_over_the_whole_batch(traps, where):
    """And so are their gradients: where replicas hold different numbers of them."""
    np.testing.assert_allclose(normalized(where), normalized("one"), rtol=1e-5, atol=1e-5)


def test_keras_itself_leaves_them_out_by_replica(traps):
    assert np.abs(np.subtract(normalized("one"), traps["by_mask"])).max() > 0.01


@pytest.mark.usefixtures("traps")
@pytest.mark.parametrize("where", WHERES)
def test_large_numbers_are_normalised_as_on_one_device(where):
    one = normalized("one", synchronized=False, **LARGE)
    np.testing.assert_allclose(normalized(where, **LARGE), one, rtol=1e-3, atol=1e-3)


def test_keras_itself_loses_the_variance_of_large_numbers(traps):
    assert np.abs(np.subtract(normalized("one", synchronized=False, **LARGE), traps["large"])).max() > 0.05


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


@pytest.mark.usefixtures("traps")
def test_an_unrolled_cell_keeps_the_mask_of_its_replica_through_a_sequence():
    one, two = masks_of_cells("mirrored-2")
    assert (one[:, :1] == one).all()
    assert (two[:, :1] == two).all()
    assert (one != two).any()


def test_replicas_that_assign_a_sum_add_their_changes():
    with strategy_called("mirrored-2").scope():
        layer = keras.layers.Layer()
        seen = layer.add_weight(shape=(), initializer="ones", trainable=False, aggregation="sum")
    layer_aggregation.add_changes(seen)

    def count(replica: tf.Tensor, _step: tf.Tensor) -> tf.Tensor:
        seen.assign(seen + 2.0 + tf.cast(replica, tf.float32))
        return replica

    per_replica(strategy_called("mirrored-2"), count)(0)
    assert 6.0 == float(seen.numpy())  # 1, and 2 and 3 of the replicas


def test_keras_itself_drops_the_same_units_on_every_replica(traps):
    kept = np.array(traps["dropout"]["mirrored-2"]["kept"])
    np.testing.assert_array_equal(kept[:, 0], kept[:, 1])
    assert (kept[0] != kept[2]).any()  # and other ones when the step is done again


def test_central_storage_itself_refuses_dropout(traps):
    assert "You must specify an aggregation method" in traps["dropout"]["central-2"]["error"]
