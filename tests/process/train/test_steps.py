"""Steps of replicas, micro-batches and virtual shards: bits, memory, signals; their numbers: `tests/differential`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.backend.common.variables import AutocastScope

from cluster.system.errors import RunFailed
from tests.support.small_training import (
    CLASSES,
    CLIPPED,
    FEATURES,
    OBJECTIVE,
    PLAIN,
    SEED,
    STEPS,
    new_model,
    per_replica,
    prepare,
    strategy_called,
    training,
    weights_of,
)
from train import patches, program
from train.config import Optimizer
from train.data.batches import Batch
from train.data.sources import Source
from train.loops import evaluation, steps
from train.loops.actions import CheckFinite
from train.loops.loop import CallProgress
from train.loops.train_step import TrainStep
from train.model import gradients
from train.patches import variable_updates
from train.patches.exact_order import keep_order_of_sums
from train.telemetry.positions import Positions

DEVICES = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    keep_order_of_sums(2, deterministic=True)
    return prepare(tmp_path_factory.mktemp("data"))


def whole_model() -> keras.Model:
    """Return a model whose layers depend on the micro-batch."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    hidden = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("one", {"micro_batches": 2}),
        ("mirrored-3", {"micro_batches": 3, "elastic": True, "model_of": whole_model}),  # one has two shards
    ],
)
def test_the_bits_must_be_the_same_from_an_iterator_and_of_virtual_shards_on_any_replicas(source, where, how):
    read = dataclasses.replace(source, in_memory=False)
    one, other = (training(*given, CLIPPED, **how).trained() for given in (("one", source), (where, read)))
    assert one == other


def test_dropout_must_draw_again_for_every_step_micro_batch_and_replica(source):
    def model_of() -> keras.Model:
        keras.utils.set_random_seed(SEED)
        return keras.Sequential([keras.Input((32,)), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)])

    strategy = strategy_called("mirrored-3")
    train_step = training("mirrored-3", source, PLAIN, model_of=model_of).train_step
    batch = Batch(tf.ones([1, 32]), tf.zeros([1], tf.int64), tf.ones([1]))
    first, second, uncut = (
        per_replica(strategy, lambda replica, step, m=m: train_step.compute(lambda _: batch, step, replica, m).loss)
        for m in (tf.constant(0, tf.int64), tf.constant(1, tf.int64), None)
    )
    assert first(5) == uncut(5)
    assert 12 == len({*first(5), *second(5), *first(6), *second(6)})


def largest_temporary(source: Source, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes of the largest activation in the graph of a step, and so of what memory holds of each layer."""
    layers = [keras.Input((FEATURES,)), *(keras.layers.Dense(512) for _ in range(3)), keras.layers.Dense(CLASSES)]
    done = training("one", source, PLAIN, micro_batches=micro_batches, model_of=lambda: keras.Sequential(layers))
    made: list[int] = []
    compute = TrainStep.compute

    def watched(*args: Any) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        computed = compute(*args)
        weights = {tuple(weight.shape) for weight in done.train_step.weights}
        for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
            made.extend(
                output.shape.num_elements() * output.dtype.size
                for output in operation.outputs
                if output.shape.is_fully_defined() and tuple(output.shape) not in weights
            )
        return computed

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute", watched)
        done.run(0, 1)
    return max(made)


def test_memory_must_fall_with_the_number_of_micro_batches(source, monkeypatch):
    assert largest_temporary(source, 4, monkeypatch) * 4 == largest_temporary(source, 1, monkeypatch)


@pytest.mark.parametrize(
    ("precision", "optimizer", "computes", "far"),
    [("bf16", PLAIN, "bfloat16", 0.01), ("fp16", CLIPPED, "float16", 1e-4)],
)
def test_layers_compute_in_less_and_weights_stay_in_float32(source, precision, optimizer, computes, far):
    less, full = (training("one", source, optimizer, each).trained() for each in (precision, "fp32"))
    assert ([computes], ["float32"]) == (less["computes"], less["dtypes"])
    np.testing.assert_allclose(less["weights"], full["weights"], atol=far)
    assert less["losses"] != full["losses"]


def test_a_layer_that_computes_in_less_still_counts_in_float32():
    """Its `value` is a copy in float16, not a variable."""
    count = keras.Variable(1.0)
    with AutocastScope("float16"):
        variable_updates.assign_add(count, 4097.0)
        variable_updates.assign_sub(count, 1.0)
    assert ("float32", 4097.0) == (count.dtype, float(count.numpy()))


def test_tf_keras_takes_clipped_gradients():
    """As `--loop fit` under parameter servers gives them."""
    optimizer, weight = tf_keras.optimizers.SGD(0.5), tf.Variable([3.0, 4.0])
    gradients.GradientPolicy(optimizer, clip_norm=1.0).install([])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight**2) / 2  # its gradient is the weight, of norm 5
    optimizer.minimize(loss, [weight], tape=tape)
    np.testing.assert_allclose(weight.numpy(), [3 - 0.5 * 0.6, 4 - 0.5 * 0.8], rtol=1e-6)
    assert 1 == int(optimizer.iterations)


STEEP = dataclasses.replace(OBJECTIVE, loss=lambda labels, outputs: 1e7 * OBJECTIVE.loss(labels, outputs))
"""Its loss is a float32, and its gradients are too large for float16 even where nothing scales them."""


@pytest.mark.parametrize(("where", "elastic"), [("central-3", False), ("one", True)])
def test_a_step_that_overflows_is_skipped_whole_and_halves_the_scale(source, where, elastic):
    adam = Optimizer(warmup_steps=0, clip_norm=CLIPPED.clip_norm)
    done = training(where, source, adam, "fp16", elastic=elastic)
    optimizer = done.train_step.policy.optimizer
    done.scale.good_steps.assign(7)
    before, found = weights_of(done.train_step.model), []
    for step, scale in enumerate((2.0**40, 2.0**10)):
        done.scale.scale.assign(scale)
        assert np.isfinite(done.run(step, 1).losses).all()
        moved = weights_of(done.train_step.model) != before
        slots = any(np.any(variable.numpy()) for variable in optimizer.variables[2:])
        counts = int(optimizer.iterations.numpy()), int(done.scale.good_steps.numpy())
        found.append((moved, slots, *counts, done.scale.metrics()))
    skipped = (False, False, 0, 0, {"loss_scale": 2.0**39, "skipped_steps": 1})
    assert [skipped, (True, True, 1, 1, {"loss_scale": 2.0**10, "skipped_steps": 1})] == found


def test_a_training_that_overflows_at_scale_1_ends(source):
    """From a scale of 2, so after the second step."""
    done = training("one", source, PLAIN, "fp16", objective=STEEP)
    done.scale.scale.assign(2.0)
    before = weights_of(done.train_step.model)
    result = done.run(0, STEPS)
    with pytest.raises(RunFailed, match="step 2 "):
        CheckFinite(done.train_step.policy, lambda step: None).after(CallProgress(0, result, 1.0, compiled=True))
    assert weights_of(done.train_step.model) == before


def test_the_scale_doubles_after_many_good_steps(source):
    """The second of three steps is the last before it grows."""
    done = training("one", source, PLAIN, "fp16")
    done.scale.good_steps.assign(gradients.GROWS_AFTER - 2)
    scales = []
    for step in range(3):
        done.run(step, 1)
        scales.append(float(done.scale.scale.numpy()))
    assert [2.0**15, 2.0**16, 2.0**16] == scales


class Disagreeing(keras.layers.Layer):
    """Keeps a whole number that depends on the examples."""

    def build(self, _shape: Sequence[int]) -> None:
        self.positive = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="positive")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.positive.assign_add(keras.ops.sum(keras.ops.cast(inputs > 0, "int32")))
        return inputs


def test_a_state_that_replicas_disagree_on_must_be_refused_by_its_name(source):
    def model_of() -> keras.Model:
        return keras.Sequential([keras.Input((FEATURES,)), Disagreeing(), keras.layers.Dense(CLASSES)])

    with pytest.raises(Exception) as raised:
        training("mirrored-3", source, PLAIN, model_of=model_of).trained()
    explained = program.explain(raised.value)
    assert isinstance(explained, RunFailed)
    assert "positive" in str(explained)


NO, YES = False, True
SIGNALS = ((NO, NO, NO), (NO, YES, NO), (YES, NO, YES), (NO, NO, YES), (YES, YES, YES))


@pytest.mark.parametrize("where", ["one", "mirrored-3", "central-3"])
def test_signals_of_one_task_reach_every_task(source, where):
    """Every replica of the task reports what it wants, so that several of them come back added up."""
    run, strategy = training(where, source, PLAIN).run, strategy_called(where)
    expected = [steps.Signals(*signals) for signals in SIGNALS]
    agree = steps.agreement(strategy)
    assert expected == [run(step, 1, lambda *_, one=one: one).signals for step, one in enumerate(expected)]
    assert expected == [agree(one) for one in expected]
    replicas = strategy.num_replicas_in_sync
    assert [[-1] * replicas, [2**40] * replicas] == [steps.gathering(strategy)(number) for number in (-1, 2**40)]


@pytest.mark.parametrize("where", ["one", "mirrored-3"])
def test_evaluation_takes_each_of_1003_examples_of_an_iterator_once(source, where):
    """Also the second time, and without the weights that the split has."""
    examples, model = source.examples("test"), new_model(0)
    expected = np.mean(np.argmax(model(examples.features), -1) == examples.labels.numpy())
    strategy = strategy_called(where)
    with strategy.scope():
        model = new_model(0)
    positions, streamed = Positions(), dataclasses.replace(source, in_memory=False)
    evaluate = evaluation.new_evaluation(strategy, model, OBJECTIVE, streamed, 100, positions)
    assert [pytest.approx(expected)] * 2 == [evaluate()["eval_accuracy"] for _ in range(2)]
    assert positions.current().batch == -(-1003 // (100 * (strategy.num_replicas_in_sync if strategy else 1))) - 1
