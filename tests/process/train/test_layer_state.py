"""Layers with state, losses and constraints: several replicas and micro-batches give the numbers of plain Keras."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import RunFailed, UsageError
from tests.support.small_training import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    NUM_TRAIN,
    PLAIN,
    SEED,
    STEPS,
    Training,
    prepare,
    training,
)
from tests.support.tracking import Tracking
from train import patches, program
from train.data import memory, sources
from train.data.batches import BatchSlice

DEVICES = 3
RATE = PLAIN.learning_rate


class Disagreeing(keras.layers.Layer):
    """Keeps a whole number that depends on the examples."""

    def build(self, _shape: Sequence[int]) -> None:
        self.positive = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="positive")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.positive.assign_add(keras.ops.sum(keras.ops.cast(inputs > 0, "int32")))
        return inputs


class Conditional(keras.layers.Layer):
    """Assigns inside a condition."""

    def build(self, _shape: Sequence[int]) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        tf.cond(tf.reduce_any(inputs > 0), lambda: self.calls._value is None or self.calls.assign(1.0), lambda: 1.0)
        return inputs


def new_model(kind: str) -> keras.Model:
    """Return a model whose weights are always the same."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    hidden = layers.Dense(
        8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.05), kernel_constraint="non_neg"
    )
    more = {
        "tracking": [Tracking()],
        "normalized": [layers.BatchNormalization(momentum=0.5), Tracking()],
        "disagreeing": [Disagreeing()],
        "conditional": [Conditional()],
    }[kind]
    return keras.Sequential([keras.Input((FEATURES,)), hidden, *more, layers.Dense(CLASSES)])


def results(losses: list[float], model: keras.Model) -> dict[str, Any]:
    """Return the losses and all variables, by name."""
    return {
        "losses": losses,
        "variables": {f"{at} {one.name}": one.numpy().tolist() for at, one in enumerate(model.variables)},
    }


def of_keras(kind: str, source: sources.Source) -> dict[str, Any]:
    """Return Keras's results on one device."""
    model = new_model(kind)
    model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    examples = memory.load(source.arrays.train)
    losses = []
    for step in range(STEPS):
        at_B = memory.train_indices(step, 0, BatchSlice(GLOBAL_BATCH, SEED), NUM_TRAIN)
        model.reset_metrics()
        losses.append(float(model.train_on_batch(tf.gather(examples.features, at_B), tf.gather(examples.labels, at_B))))
    return results(losses, model)


def of_ours(kind: str, where: str, source: sources.Source, **how: Any) -> dict[str, Any]:
    """Return the results of our step."""
    found: Training = training(where, source, PLAIN, model_of=lambda: new_model(kind), **how)
    return results(found.trained()["losses"], found.train_step.model)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> sources.Source:
    tf.config.experimental.enable_op_determinism()
    return prepare(tmp_path_factory.mktemp("data"))["own:plain"]


@pytest.fixture(scope="module")
def of_plain_keras(source) -> dict[str, Any]:
    """What Keras comes to before it is patched, by the kind of layers."""
    computed = {kind: of_keras(kind, source) for kind in ("tracking", "normalized")}
    patches.apply()
    return computed


@pytest.mark.parametrize(
    ("kind", "where", "how"),
    [
        ("normalized", "one", {}),
        ("normalized", "mirrored-3", {}),
        ("normalized", "central-2", {}),
        ("tracking", "one", {"micro_batches": 3}),
        ("tracking", "mirrored-3", {"micro_batches": 2}),
        ("tracking", "central-2", {"micro_batches": 3}),
        ("tracking", "one", {"elastic": True}),
    ],
)
def test_losses_and_variables_must_be_those_of_plain_keras(of_plain_keras, source, kind, where, how):
    """With `add_loss` next to BatchNormalization, means, counts of steps and examples, and a constraint."""
    expected, actual = of_plain_keras[kind], of_ours(kind, where, source, **how)
    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-6)
    assert [*expected["variables"]] == [*actual["variables"]]
    for name, value in expected["variables"].items():
        np.testing.assert_allclose(actual["variables"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("of_plain_keras")
def test_virtual_shards_must_give_the_same_bits_on_any_replicas(source):
    one, three = (of_ours("tracking", where, source, elastic=True) for where in ("one", "mirrored-3"))
    assert one == three


@pytest.mark.usefixtures("of_plain_keras")
@pytest.mark.parametrize(
    ("kind", "error", "named"), [("disagreeing", RunFailed, "positive"), ("conditional", UsageError, "calls")]
)
def test_a_state_that_cannot_be_one_must_be_refused_by_its_name(source, kind, error, named):
    """A whole number that depends on the examples, and what is assigned inside a condition on several replicas."""
    with pytest.raises(Exception) as raised:
        of_ours(kind, "mirrored-3", source)
    explained = program.explain(raised.value) or raised.value
    assert isinstance(explained, error)
    assert named in str(explained)


@pytest.mark.usefixtures("of_plain_keras")
def test_one_replica_may_assign_inside_a_condition(source):
    of_ours("conditional", "one", source)
