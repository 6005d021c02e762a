"""Whole trainings: on one core, for three epochs, with slow steps, and from other weights in each task."""

import os

import pytest

from cluster.system.errors import EXIT_FAILED
from tests.e2e.scenario import Clusters, summary

pytestmark = pytest.mark.usefixtures("data")  # what each task reads: `test_sources.py`

MADE = '''
"""Noise around a corner for each class; steps of a second, and a callback that once takes half a minute."""

import time
import numpy as np
import tensorflow as tf
from tensorflow import keras

from train.config import Optimizer, TrainConfig

COUNTS = {"train": 1000, "test": 100}


class Made:
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return COUNTS[self.split]

    def __getitem__(self, index):
        random = np.random.default_rng([index, self.split == "test"])
        label = index % 4
        return (random.normal(size=8) + 3 * np.eye(8)[label]).astype("float32"), label


def indexed(split, shard):
    return Made(split)


def model(feature_shape, num_outputs):
    layers = keras.layers
    return keras.Sequential([keras.Input(feature_shape), layers.Dense(16, "relu"), layers.Dense(num_outputs)])


class Slow(keras.layers.Layer):
    def call(self, inputs, training=False):
        def wait():
            time.sleep(1)
            return np.float32(0)

        waited = tf.ensure_shape(tf.numpy_function(wait, [], tf.float32), [])
        return inputs + tf.stop_gradient(waited) if training else inputs


def slow(feature_shape, num_outputs):
    return keras.Sequential([keras.Input(feature_shape), Slow(), keras.layers.Dense(num_outputs)])


def unseeded(feature_shape, num_outputs):
    made = model(feature_shape, num_outputs)
    made.layers[0].bias.assign(np.random.default_rng().normal(size=16))
    return made


class Pause(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(30 if epoch == 0 else 0)

pauses = lambda run_dir, task: [Pause()]


def preset():
    return TrainConfig(
        source="function", dataset="made:indexed", num_outputs=4, model="made:model", global_batch=40, epochs=2,
        log_every=1, optimizer=Optimizer(learning_rate=1e-2, warmup_steps=0),
    )
'''


@pytest.fixture(scope="module")
def own(clusters, tmp_path_factory) -> Clusters:
    """Clusters whose user has a module with a dataset function."""
    return clusters.with_modules(tmp_path_factory.mktemp("own"), own_data=True, made=MADE)


@pytest.mark.extended
@pytest.mark.parametrize("topology", ["", "--ps=1 --loop=fit"])
def test_slow_steps_and_callbacks_must_not_count_as_a_hang(own, topology):
    options = f"--preset=made:preset --workers=1 --hang-timeout=13 --checkpoint-every=100 {topology}"
    parts = ("--model=made:slow", "--callbacks=made:pauses", "--global-batch=20", "--max-steps=60")
    ended = summary(own.up(f"slow-{len(topology)}", options, training=parts))
    assert ("succeeded", []) == (ended["state"], ended["restarts"])


@pytest.mark.extended
def test_a_model_that_each_task_begins_with_other_weights_must_fail_at_once(own):
    words = ("--preset=made:preset", "--workers=1")
    ended = summary(own.up("unseeded", *words, training=("--model=made:unseeded",), expect=EXIT_FAILED))
    assert ("failed", 0, []) == (ended["state"], ended["steps"], ended["restarts"])


@pytest.mark.long
def test_three_epochs_must_end_above_088(clusters):
    assert summary(clusters.up("full", training=(), timeout_s=500))["metrics"]["eval_accuracy"] > 0.88


@pytest.mark.long
def test_parameter_servers_must_train_on_one_core(clusters):
    core = str(min(os.sched_getaffinity(0)))
    Clusters(clusters.runs_dir, limits=("taskset", "--cpu-list", core)).up("one-core", "--workers=2 --ps=1")
    assert "succeeded" == summary(clusters.run("one-core"))["state"]
