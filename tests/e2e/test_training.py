"""Whole trainings: on datasets as functions of (split, shard), read by each task, on one core, and for three epochs."""

import os

import pytest

from cluster.contract.run.folder import RunFolder
from tests.e2e.scenario import Clusters, summary

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("data")]  # what each task reads: `test_sources.py`

MADE = '''
"""Noise around a corner for each class."""

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


def streamed(split, shard):
    def example(index):
        noise = tf.random.stateless_normal([8], [index, int(split == "test")], alg="philox")
        return noise + 3 * tf.one_hot(index % 4, 8), index % 4

    dataset = tf.data.Dataset.range(COUNTS[split]).shard(shard.count, shard.index)
    if split == "train":
        dataset = dataset.shuffle(200, seed=shard.seed)
    return dataset.map(example)


def model(feature_shape, num_outputs):
    layers = keras.layers
    return keras.Sequential([keras.Input(feature_shape), layers.Dense(16, "relu"), layers.Dense(num_outputs)])


def preset():
    return TrainConfig(
        source="function", dataset="made:indexed", num_outputs=4, model="made:model", global_batch=40, epochs=2,
        log_every=1, optimizer=Optimizer(learning_rate=1e-2, warmup_steps=0),
    )
'''


@pytest.fixture(scope="module")
def own(clusters, tmp_path_factory) -> Clusters:
    """Clusters whose user has a module with two dataset functions."""
    return clusters.with_modules(tmp_path_factory.mktemp("own"), own_data=True, made=MADE)


def train(own: Clusters, name: str, topology: str, *overrides: str) -> RunFolder:
    """Train to the end; return the run folder."""
    run = own.up(name, "--preset=made:preset", topology, "--", *overrides, training=())
    assert "succeeded" == summary(run)["state"]
    assert summary(run)["metrics"]["eval_accuracy"] > 0.8
    return run


def test_two_tasks_read_shards_of_their_own(own):
    train(own, "streamed", "--workers=1 --micro-batches=2", "--dataset", "made:streamed")


@pytest.mark.parametrize("dataset", ["made:streamed", "made:indexed"])
def test_functions_feed_workers_of_parameter_servers(own, dataset):
    train(own, f"served-{dataset.partition(':')[2]}", "--workers=1 --ps=1", "--dataset", dataset)


def test_three_epochs_must_end_above_088(clusters):
    run = clusters.up("full", training=(), timeout_s=500)
    assert summary(run)["metrics"]["eval_accuracy"] > 0.88


def test_parameter_servers_must_train_on_one_core(clusters):
    core = str(min(os.sched_getaffinity(0)))
    Clusters(clusters.runs_dir, limits=("taskset", "--cpu-list", core)).up("one-core", "--workers=2 --ps=1")
    assert "succeeded" == summary(clusters.run("one-core"))["state"]
