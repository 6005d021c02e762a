"""Half precision, loss scaling and clipping: the right numbers, and the same ones on any number of replicas."""

import dataclasses
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
    GLOBAL_BATCH,
    OBJECTIVE,
    PLAIN,
    SEED,
    STEPS,
    new_model,
    prepare,
    strategy_called,
    training,
    weights_of,
)
from train import patches
from train import strategy as strategies
from train.config import Optimizer, TrainConfig
from train.data import sources
from train.loops.actions import CheckFinite
from train.loops.loop import Progress
from train.model import gradients, optimizers
from train.patches import variable_updates

DEVICES = 3
STEEP = dataclasses.replace(OBJECTIVE, loss=lambda labels, outputs: 1e7 * OBJECTIVE.loss(labels, outputs))
"""Its loss is a float32, and its gradients are too large for float16 even where nothing scales them."""


def clipped_by_hand(source: sources.Source) -> list[float]:
    """Return the weights that plain TensorFlow reaches on the whole batches of `CLIPPED`."""
    done = training("one", source, PLAIN)
    model, feed = done.train_step.model, sources.train_feed(strategy_called("one"), source, 0, GLOBAL_BATCH, SEED)
    variables = [variable.value for variable in model.trainable_variables]
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss, _ = done.train_step.shares(feed.batch((), tf.constant(step, tf.int64), tf.constant(0, tf.int64)))
        slopes = tape.gradient(loss, variables)
        norm = np.sqrt(sum(float(tf.reduce_sum(gradient**2)) for gradient in slopes))
        for variable, gradient in zip(variables, slopes, strict=True):
            variable.assign_sub(PLAIN.learning_rate * gradient * min(1, CLIPPED.clip_norm / norm))
    return weights_of(model)


def overflowing(where: str, source: sources.Source, *, elastic: bool = False) -> dict[str, Any]:
    """Return the results of two steps of Adam, the first of which overflows float16."""
    done = training(where, source, Optimizer(warmup_steps=0, clip_norm=CLIPPED.clip_norm), "fp16", elastic=elastic)
    assert done.scale is not None
    done.scale.scale.assign(2.0**40)
    done.scale.good_steps.assign(7)
    before = weights_of(done.train_step.model)
    found = {}
    for step, name in enumerate(("first", "second")):
        if step:
            done.scale.scale.assign(2.0**10)
        losses = done.run(step, 1).losses.tolist()
        slots = [np.abs(variable.numpy()).max().item() for variable in done.train_step.policy.optimizer.variables[2:]]
        found[name] = {
            "losses": losses,
            "moved": bool(weights_of(done.train_step.model) != before),
            "slots": max(slots),
            "iterations": int(done.train_step.policy.optimizer.iterations.numpy()),
            "good": int(done.scale.good_steps.numpy()),
            **done.scale.metrics(),
        }
    return found


def fitted(where: str, optimizer: Optimizer, precision: str) -> list[float]:
    """Return the weights that Keras 3's `fit` reaches in three steps, on the same batch."""
    strategy = strategy_called(where)
    random = np.random.default_rng(0)
    features_BF = random.normal(size=(GLOBAL_BATCH, FEATURES)).astype(np.float32)
    labels_B = random.integers(0, CLASSES, GLOBAL_BATCH)
    with strategy.scope(), strategies.policy(precision):
        model = new_model(0)
        config = TrainConfig(optimizer=optimizer, precision=precision)
        built = optimizers.build(config)
        built.build(model.trainable_variables)
        optimizers.policy(config, built).install()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(built, loss, jit_compile=False)
        model.optimizer = built
    data = tf.data.Dataset.from_tensor_slices((features_BF, labels_B)).batch(GLOBAL_BATCH).repeat()
    model.fit(data, steps_per_epoch=3, epochs=1, verbose=0)
    return weights_of(model)


OPTIMIZERS = {
    "adamw": {"schedule": "cosine", "decay_steps": STEPS},
    "lamb": {"schedule": "linear", "decay_steps": STEPS, "weight_decay": 0.1},
    "lion": {"schedule": "polynomial", "decay_steps": STEPS, "weight_decay": 0.1, "no_decay": "bias"},
    "sgd": {"schedule": "piecewise", "boundaries": "2:0.1", "nesterov": True},
}


def averaged(where: str, source: sources.Source, name: str) -> dict[str, list[float]]:
    """Return the weights that an optimizer reaches, and their averages."""
    settings = Optimizer(name=name, learning_rate=0.05, warmup_steps=1, ema=0.5, **OPTIMIZERS[name])
    done = training(where, source, settings)
    done.run(0, STEPS)
    model = done.train_step.model
    with optimizers.averaged(TrainConfig(optimizer=settings), model, done.train_step.policy.optimizer):
        averages = weights_of(model)
    return {"weights": weights_of(model), "averages": averages}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> sources.Source:
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    return prepare(tmp_path_factory.mktemp("data"))["own:weighted"]


@pytest.fixture(scope="module")
def plain(source) -> dict[str, Any]:
    return training("one", source, PLAIN).trained()


@pytest.fixture(scope="module")
def clipped(source) -> dict[str, Any]:
    return training("one", source, CLIPPED).trained()


# Clipping


def test_the_gradient_of_the_global_batch_is_clipped_whatever_the_replicas(source, plain, clipped):
    by_hand = clipped_by_hand(source)
    for weights in (clipped["weights"], training("mirrored-3", source, CLIPPED).trained()["weights"]):
        np.testing.assert_allclose(weights, by_hand, rtol=1e-5, atol=1e-6)
    assert np.abs(np.subtract(clipped["weights"], plain["weights"])).max() > 0.1  # it changes the training


@pytest.mark.usefixtures("source")
def test_fit_clips_and_scales_as_the_custom_loop_does():
    whole, cut, on_replicas = (
        fitted(*how) for how in (("one", PLAIN, "fp32"), ("one", CLIPPED, "fp32"), ("mirrored-3", CLIPPED, "fp16"))
    )
    np.testing.assert_allclose(on_replicas, cut, atol=1e-3)
    assert np.abs(np.subtract(cut, whole)).max() > 0.1


def test_without_clipping_and_fp16_keras_is_left_alone():
    config = TrainConfig(precision="bf16")
    optimizer = optimizers.build(config)
    policy = optimizers.policy(config, optimizer)
    policy.install()
    assert "apply" not in vars(optimizer)
    assert policy.loss_gradient is None


# Precision


@pytest.mark.parametrize(
    ("precision", "optimizer", "full", "computes", "far"),
    [("bf16", PLAIN, "plain", "bfloat16", 0.01), ("fp16", CLIPPED, "clipped", "float16", 1e-4)],
)
def test_layers_compute_in_less_and_weights_stay_in_float32(source, request, precision, optimizer, full, computes, far):
    less, full = training("one", source, optimizer, precision).trained(), request.getfixturevalue(full)
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


def test_virtual_shards_give_the_same_bits_in_half_precision(source, clipped):
    """Clipped, too."""
    one, three = (training(where, source, CLIPPED, "fp16", elastic=True).trained() for where in ("one", "mirrored-3"))
    assert one == three
    np.testing.assert_allclose(one["weights"], clipped["weights"], atol=1e-4)


# Loss scaling


@pytest.mark.parametrize(("where", "elastic"), [("central-2", False), ("mirrored-3", True)])
def test_a_step_that_overflows_is_skipped_whole_and_halves_the_scale(source, where, elastic):
    steps_of = overflowing(where, source, elastic=elastic)
    first, second = steps_of["first"], steps_of["second"]
    assert (False, 0, 0) == (first["moved"], first["iterations"], first["slots"])
    assert (2.0**39, 1, 0) == (first["loss_scale"], first["skipped_steps"], first["good"])
    assert (True, 1, 1) == (second["moved"], second["iterations"], second["good"])
    assert (2.0**10, 1) == (second["loss_scale"], second["skipped_steps"])
    assert second["slots"] > 0
    assert np.isfinite([*first["losses"], *second["losses"]]).all()


def test_a_training_that_overflows_at_scale_1_ends(source):
    """From a scale of 2, so after the second step."""
    done = training("one", source, PLAIN, "fp16", objective=STEEP)
    done.scale.scale.assign(2.0)
    before = weights_of(done.train_step.model)
    result = done.run(0, STEPS)
    with pytest.raises(RunFailed, match="step 2 "):
        CheckFinite(done.train_step.policy).after(Progress(0, result, 1.0, compiled=True))
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_decay_and_average_weights_as_one_device_does(source, name):
    one, three = (averaged(where, source, name) for where in ("one", "mirrored-3"))
    for kind in ("weights", "averages"):
        np.testing.assert_allclose(three[kind], one[kind], atol=2e-5)
    assert np.abs(np.subtract(one["weights"], one["averages"])).max() > 0.001


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
