"""Half precision, loss scaling and clipping: the right numbers, and the same ones on any number of replicas."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.backend.common.variables import AutocastScope  # has no public name

from tests.support.measured import measured
from train.config import Optimizer, TrainConfig
from train.model import gradients, optimizers
from train.patches import variable_updates


def numbers(what: str) -> dict[str, Any]:
    return measured("precision", "3")[what]


# Clipping


@pytest.mark.parametrize("where", ["one", "mirrored-3"])
def test_the_gradient_of_the_global_batch_is_clipped_whatever_the_replicas(where):
    clipped = numbers("clipped")
    np.testing.assert_allclose(clipped[where]["weights"], clipped["by hand"], rtol=1e-5, atol=1e-6)


def test_clipping_changes_the_training():
    """Else it would prove nothing above."""
    assert np.abs(np.subtract(numbers("clipped")["one"]["weights"], numbers("plain")["one"]["weights"])).max() > 0.1


def test_fit_clips_and_scales_as_the_custom_loop_does():
    found = numbers("fit")
    np.testing.assert_allclose(found["on replicas"], found["clipped"], atol=1e-3)
    assert np.abs(np.subtract(found["clipped"], found["plain"])).max() > 0.1


def test_without_clipping_and_fp16_keras_is_left_alone():
    config = TrainConfig(precision="bf16")
    optimizer = optimizers.build(config)
    policy = optimizers.policy(config, optimizer)
    policy.install()
    assert "apply" not in vars(optimizer)
    assert policy.loss_gradient is None


# Precision


@pytest.mark.parametrize(("kind", "computes", "far"), [("bf16", "bfloat16", 0.01), ("fp16", "float16", 1e-4)])
def test_layers_compute_in_less_and_weights_stay_in_float32(kind, computes, far):
    found, full = numbers(kind)["one"], numbers({"bf16": "plain", "fp16": "clipped"}[kind])["one"]
    assert ([computes], ["float32"]) == (found["computes"], found["dtypes"])
    np.testing.assert_allclose(found["weights"], full["weights"], atol=far)
    assert found["losses"] != full["losses"]


def test_a_layer_that_computes_in_less_still_counts_in_float32():
    """Its `value` is a copy in float16, not a variable."""
    count = keras.Variable(1.0)
    with AutocastScope("float16"):
        variable_updates.assign_add(count, 4097.0)
        variable_updates.assign_sub(count, 1.0)
    assert ("float32", 4097.0) == (count.dtype, float(count.numpy()))


def test_virtual_shards_give_the_same_bits_in_half_precision():
    """Clipped, too."""
    found = numbers("elastic")
    assert found["one"] == found["mirrored-3"]
    np.testing.assert_allclose(found["one"]["weights"], numbers("clipped")["one"]["weights"], atol=1e-4)


# Loss scaling


@pytest.mark.parametrize("where", ["central-2", "elastic"])
def test_a_step_that_overflows_is_skipped_whole_and_halves_the_scale(where):
    first, second = numbers("overflow")[where]["first"], numbers("overflow")[where]["second"]
    assert (False, 0, 0) == (first["moved"], first["iterations"], first["slots"])
    assert (2.0**39, 1, 0) == (first["loss_scale"], first["skipped_steps"], first["good"])
    assert (True, 1, 1) == (second["moved"], second["iterations"], second["good"])
    assert (2.0**10, 1) == (second["loss_scale"], second["skipped_steps"])
    assert second["slots"] > 0
    assert np.isfinite([*first["losses"], *second["losses"]]).all()


def test_a_training_that_overflows_at_scale_1_ends():
    """From a scale of 2, so after the second step."""
    found = numbers("exhausted")
    assert found["message"].startswith("RunFailed: gradients overflow float16 at step 2 even at loss scale 1 ")
    assert not found["moved"]


def test_the_scale_doubles_after_many_good_steps():
    assert [2.0**15, 2.0**16, 2.0**16] == numbers("grown")


def test_tf_keras_takes_clipped_gradients():
    """As `--loop fit` under parameter servers gives them."""
    optimizer, weight = tf_keras.optimizers.SGD(0.5), tf.Variable([3.0, 4.0])
    gradients.GradientPolicy(optimizer, clip_norm=1.0).install()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight**2) / 2  # its gradient is the weight, of norm 5
    optimizer.minimize(loss, [weight], tape=tape)
    np.testing.assert_allclose(weight.numpy(), [3 - 0.5 * 0.6, 4 - 0.5 * 0.8], rtol=1e-6)
    assert 1 == int(optimizer.iterations)


# Optimizers


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "sgd"])
def test_replicas_decay_and_average_weights_as_one_device_does(name):
    found = numbers("optimizers")[name]
    for what in ("weights", "averages"):
        np.testing.assert_allclose(found["mirrored-3"][what], found["one"][what], atol=2e-5)
    assert np.abs(np.subtract(found["one"]["weights"], found["one"]["averages"])).max() > 0.001


# Learning rates


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        (Optimizer(learning_rate=0.1), 0.1),
        (Optimizer(learning_rate=0.1, scaling="linear", base_batch=48), 0.4),
        (Optimizer(learning_rate=0.1, scaling="sqrt", base_batch=48), 0.2),
    ],
)
def test_the_warm_up_ends_at_the_learning_rate_of_the_batch(settings, rate):
    config = TrainConfig(global_batch=192, optimizer=dataclasses.replace(settings, warmup_steps=10))
    schedule = optimizers.build(config)._learning_rate
    np.testing.assert_allclose([schedule(0), schedule(10), schedule(99)], [rate / 10, rate, rate], rtol=1e-6)
    np.testing.assert_allclose(optimizers.build(dataclasses.replace(config, callbacks="tutorial")).learning_rate, rate)
