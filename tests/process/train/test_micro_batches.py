"""Gradient accumulation: what micro-batches change, and what they must not."""

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.contract.compatibility import check_micro_batches
from cluster.system.errors import UsageError
from tests.support.small_training import (
    CLASSES,
    CLIPPED,
    FEATURES,
    GLOBAL_BATCH,
    OBJECTIVE,
    SEED,
    new_model,
    per_replica,
    prepare,
    strategy_called,
    training,
)
from train import patches
from train.data import memory, sources
from train.data.batches import Batch, BatchSlice, Replicas
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import optimizers
from train.patches.exact_order import keep_order_of_sums

DEVICES = 3
WIDE, ROWS = 512, 384
"""Of a model whose activations are most of its memory."""


def whole_model() -> keras.Model:
    """Return a model whose layers depend on the micro-batch."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    hidden = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])


def trained(where: str, source: sources.Source, micro_batches: int, *precision: str, **how: Any) -> dict[str, Any]:
    """Train the small model with clipping and regularization; return the results."""
    return training(where, source, CLIPPED, *precision, micro_batches=micro_batches, **how).trained()


def calculated(source: sources.Source, micro_batches: int) -> list[float]:
    """Return one step's gradient of the first kernel as the documentation says it is added up, in plain TensorFlow."""
    model = new_model(0.0)
    examples = memory.load(source.arrays.train)
    at_B = memory.train_indices(0, 0, BatchSlice(GLOBAL_BATCH, SEED), 40)
    kernel = model.trainable_variables[0].value

    @tf.function(autograph=False)
    def gradient(features_BF: tf.Tensor, labels_B: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses_B = OBJECTIVE.loss(labels_B, model(features_BF, training=True))
            loss = tf.nn.compute_average_loss(losses_B, global_batch_size=GLOBAL_BATCH)
        return tape.gradient(loss, kernel)

    total = tf.zeros(kernel.shape)
    for part in np.split(at_B.numpy(), micro_batches):
        total += gradient(tf.gather(examples.features, part), tf.gather(examples.labels, part))
    return total.numpy().ravel().tolist()


def accumulated(source: sources.Source, micro_batches: int) -> list[float]:
    """Return the same gradient as the training has it: the weights' change at a learning rate of 1, and no clipping."""
    strategy = strategy_called("one")
    model = new_model(0.0)
    before = model.trainable_variables[0].numpy()
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)
    kept: list[tf.Variable] = [tf.Variable(tf.zeros(before.shape))]

    class Keeping(TrainStep):
        def update(self, computed: Any) -> tf.Tensor:
            kept[0].assign(computed.gradients[0])
            return super().update(computed)

    train_step = Keeping(
        model, optimizers.GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, 1, micro_batches=micro_batches
    )
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED, None, micro_batches)
    steps.SynchronousSteps(strategy, train_step, feed, 1)(0, 1)
    return kept[0].numpy().ravel().tolist()


def dropped() -> list[list[float]]:
    """Return the losses of the same example by replica, at the micro-batches 0 and 1 and without one."""
    strategy = strategy_called("mirrored-3")
    with strategy.scope():
        keras.utils.set_random_seed(SEED)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, optimizers.GradientPolicy(optimizer), OBJECTIVE, 3, 3)
    batch = Batch(tf.ones([1, 32]), tf.zeros([1], tf.int64), tf.ones([1]))
    numbers = [None if number is None else tf.constant(number, tf.int64) for number in (0, 1, None)]
    return [
        per_replica(strategy, lambda replica, step, m=m: train_step.compute(lambda _: batch, step, replica, m).loss)(5)
        for m in numbers
    ]


def largest_temporary(micro_batches: int) -> int:
    """Return the bytes of the largest activation in the graph of a step, and so of what memory holds of each layer."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(WIDE, "relu") for _ in range(3))])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, optimizers.GradientPolicy(optimizer), OBJECTIVE, ROWS, 1, micro_batches=micro_batches)
    strategy = strategy_called("one")
    examples = memory.Examples(tf.ones([ROWS, 8]), tf.zeros([ROWS], tf.int64), None)

    def batch(_given: Any, step: tf.Tensor, part: tf.Tensor) -> Batch:
        return memory.train_batch(examples, step, part, BatchSlice(ROWS, SEED, replicas=Replicas(micro_batches)))

    made: list[int] = []
    compute = TrainStep.compute

    def watched(*args: Any) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        computed = compute(*args)
        weights = {tuple(weight.shape) for weight in train_step.weights}
        for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
            made.extend(
                output.shape.num_elements() * output.dtype.size
                for output in operation.outputs
                if output.shape.is_fully_defined() and tuple(output.shape) not in weights
            )
        return computed

    TrainStep.compute = watched  # type: ignore[method-assign]
    try:
        steps.SynchronousSteps(strategy, train_step, sources.Feed(lambda: (), batch), 1)(0, 1)
    finally:
        TrainStep.compute = compute  # type: ignore[method-assign]
    return max(made)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, sources.Source]:
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    keep_order_of_sums(2, deterministic=True)
    return prepare(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def source(prepared) -> sources.Source:
    return prepared["own:weighted"]


@pytest.fixture(scope="module")
def whole(source) -> dict[str, Any]:
    """What one device comes to with whole batches."""
    return trained("one", source, 1)


@pytest.mark.parametrize("micro_batches", [4, 12])
def test_micro_batches_must_give_the_numbers_of_the_whole_batch(source, whole, micro_batches):
    """Weights, losses and scores within rounding, with weighted examples, regularisation and clipping."""
    cut = trained("one", source, micro_batches)
    for name in ("losses", "scores", "weights"):
        np.testing.assert_allclose(cut[name], whole[name], rtol=1e-5, atol=1e-6)
    assert whole["weights_sha256"] != cut["weights_sha256"]  # else nothing was cut


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_must_give_the_numbers_of_one(source, whole, micro_batches):
    cut = trained("mirrored-3", source, micro_batches)
    np.testing.assert_allclose(cut["weights"], whole["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("where", "micro_batches"), [("one", 4), ("mirrored-3", 2)])
def test_the_same_training_must_give_the_same_bits_also_from_an_iterator(source, where, micro_batches):
    read = dataclasses.replace(source, arrays=None)
    assert trained(where, source, micro_batches) == trained(where, read, micro_batches)


def test_the_order_of_the_sum_must_be_the_documented_one(prepared):
    """Bit for bit: from zeros, micro-batch after micro-batch. Pipelines are compared with it."""
    assert calculated(prepared["own:plain"], 4) == accumulated(prepared["own:plain"], 4)


def test_float16_must_be_scaled_checked_and_clipped_once_a_step(source, whole):
    cut = trained("one", source, 4, "fp16")
    np.testing.assert_allclose(cut["weights"], whole["weights"], atol=1e-2)
    assert 0 == cut["skipped"]


def test_virtual_shards_must_give_the_same_bits_on_any_replicas(source, whole):
    """With BatchNormalization and dropout; without them, the numbers of a plain training, too."""
    one, three = (trained(w, source, 3, elastic=True, model_of=whole_model) for w in ("one", "mirrored-3"))
    assert one == three
    simple = trained("one", source, 3, elastic=True)
    np.testing.assert_allclose(simple["weights"], whole["weights"], rtol=1e-4, atol=1e-6)


def test_batch_normalization_must_follow_every_micro_batch(source):
    mean, variance = trained("mirrored-3", source, 2, model_of=whole_model)["averages"]
    assert all(value != 0 for value in mean)
    assert all(0 < value != 1 for value in variance)


@pytest.mark.usefixtures("prepared")
def test_dropout_must_draw_again_for_every_micro_batch_and_replica():
    first, second, uncut = dropped()
    assert first == uncut
    assert 6 == len({*first, *second})


@pytest.mark.usefixtures("prepared")
def test_memory_must_fall_with_the_number_of_micro_batches():
    assert largest_temporary(4) * 4 == largest_temporary(1)


@pytest.mark.parametrize(
    ("batch", "replicas", "micro_batches", "refused"),
    [
        *((192, 3, 5, True), (192, 3, 65, True), (12, 12, 2, True), (10, 3, 1, True)),
        *((192, 3, 1, False), (192, 3, 64, False), (12, 12, 1, False)),
    ],
)
def test_only_a_batch_that_can_be_cut_evenly_must_be_accepted(batch, replicas, micro_batches, refused):
    with pytest.raises(UsageError) if refused else contextlib.nullcontext():
        check_micro_batches(batch, replicas, micro_batches)
