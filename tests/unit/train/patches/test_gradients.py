"""Patches of gradients and updates: not finite ones show in the loss, repeated rows are summed, sums keep order."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow import keras
from tensorflow.python.eager import context

from train.patches import central_sums, clipped_sums, nan_gradients, repeated_rows, variable_updates
from train.patches.exact_order import keep_order_of_sums

GOOD = tf.constant([1.0, -3e38])
SLICES = tf.IndexedSlices(tf.ones([4, 2]), tf.constant([1, 0, 1, 1]), tf.constant([3, 2]))


def loss_after(*gradients: Any) -> float:
    return float(nan_gradients.nan_if_broken(tf.constant(0.25), gradients))


def test_the_loss_stays_if_every_gradient_is_finite():
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 4]))
    assert 0.25 == loss_after(GOOD, None, sparse, tf.ones([2], tf.bfloat16))
    assert 0.25 == loss_after(None)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_the_loss_is_nan_if_a_gradient_is_not_finite(broken):
    assert math.isnan(loss_after(GOOD, tf.constant([[0.0], [broken]])))
    assert math.isnan(loss_after(GOOD, tf.IndexedSlices(tf.constant([[broken]]), tf.constant([3]))))
    assert math.isnan(loss_after(tf.constant([broken]), tf.constant([-broken])))


def step_of_adam(gradient: tf.Tensor | tf.IndexedSlices) -> np.ndarray:
    weights = keras.Variable(np.zeros([3, 2], np.float32))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([weights])
    optimizer.apply([gradient], [weights])
    return np.asarray(weights.numpy())


def test_adam_does_the_step_of_the_sum_of_repeated_rows(monkeypatch):
    monkeypatch.setattr(TFOptimizer, "_distributed_tf_update_step", repeated_rows.update)
    np.testing.assert_array_equal(step_of_adam(tf.convert_to_tensor(SLICES)), step_of_adam(SLICES))


def test_keras_itself_does_a_larger_step_of_adam(monkeypatch):
    monkeypatch.setattr(TFOptimizer, "_distributed_tf_update_step", repeated_rows.keras_update)
    ratio = step_of_adam(SLICES)[1, 0] / step_of_adam(tf.convert_to_tensor(SLICES))[1, 0]
    assert ratio == pytest.approx(3**0.5, rel=1e-3)


def test_an_optimizer_that_clips_no_more_sums_its_gradients_itself():
    optimizer = keras.optimizers.SGD()
    for optimizer.clipnorm in (1.0, None):
        clipped_sums._clip(optimizer, [GOOD])
        assert ("_all_reduce_sum_gradients" in vars(optimizer)) is (optimizer.clipnorm is not None)


def test_a_number_is_added_to_every_element():
    variable = keras.Variable([1.0, 2.0])
    variable_updates.assign_add(variable, 1)
    np.testing.assert_array_equal([2.0, 3.0], variable)


@pytest.fixture
def rewrites() -> Iterator[Any]:
    """The options of graph rewrites for all functions of this process, which are restored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.context(), "_config", None)
        patch.setattr(context.context(), "_optimizer_experimental_options", {})
        yield lambda: context.context().config.graph_options.rewrite_options
    tf.config.optimizer.set_experimental_options({})  # makes the change take effect


@pytest.mark.parametrize(("micro_batches", "deterministic"), [(1, True), (2, False), (1, False)])
def test_only_sums_that_must_repeat_are_not_rewritten(rewrites, micro_batches, deterministic):
    keep_order_of_sums(micro_batches, deterministic=deterministic)
    assert (rewrites().memory_optimization == rewrites().NO_MEM_OPT) is (micro_batches > 1 or deterministic)
    assert (rewrites().arithmetic_optimization == rewrites().OFF) is (micro_batches > 1)
    assert (rewrites().constant_folding == rewrites().OFF) is (micro_batches > 1)


PARTS_3N = np.random.default_rng(0).normal(size=(3, 1000)).astype("float32")


def sums(add: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> np.ndarray:
    """Add three tensors of which the first two are needed again."""

    @tf.function
    def add_parts(parts_3N: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        parts = [part + 0.0 for part in tf.unstack(tf.sin(parts_3N))]
        return add(parts), parts[:2]

    return add_parts(tf.constant(PARTS_3N))[0].numpy()


def test_replicas_are_added_in_their_order() -> None:
    first, second, third = tf.sin(PARTS_3N).numpy()
    in_order = (first + second) + third
    strategy = central_sums.create_strategy(["/CPU:0"])
    np.testing.assert_array_equal(in_order, sums(strategy.extended._cross_device_ops.accumulation_fn))
    assert (in_order != sums(tf.add_n)).any()  # else TensorFlow has repaired it
