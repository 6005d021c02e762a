"""Datasets as functions of (split, shard) in whole runs: the files of a user's own, read by each task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.run.folder import RunFolder
from tests.e2e.scenario import ROOT, Clusters, losses, summary

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
def own(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Clusters:
    """Clusters whose user has a module with two dataset functions."""
    folder, data = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("data")
    (folder / "made.py").write_text(MADE)
    return Clusters(clusters.runs_dir, {"PYTHONPATH": str(folder), "DATA_DIR": str(data)})


def train(own: Clusters, name: str, topology: str, *overrides: str) -> RunFolder:
    """Train to the end; return the run folder."""
    own.invoke(
        "up", f"--name={name}", "--runtime=local", "--tensorboard-port=0", "--preset=made:preset",
        *topology.split(), "--", *overrides,
    )  # fmt: skip
    run = own.run(name)
    assert "succeeded" == summary(run)["state"]
    assert summary(run)["metrics"]["eval_accuracy"] > 0.8
    return run


def test_two_tasks_read_shards_of_their_own(own: Clusters) -> None:
    train(own, "streamed", "--workers=1", "--dataset", "made:streamed", "--micro-batches", "2")


@pytest.mark.long
@pytest.mark.parametrize("dataset", ["made:streamed", "made:indexed"])
@pytest.mark.parametrize("loop", ["custom", "fit"])
def test_parameter_servers_read_them(own: Clusters, loop: str, dataset: str) -> None:
    name = f"ps-{loop}-{dataset.partition(':')[2]}"
    train(own, name, "--workers=1 --ps=1", "--dataset", dataset, "--loop", loop)


@pytest.mark.long
@pytest.mark.parametrize("topology", ["--workers=1", "--workers=0 --devices=2"])
def test_both_loops_train_on_the_same_batches(own: Clusters, topology: str) -> None:
    def of_loop(loop: str) -> list[float]:
        name = f"{loop}{topology.replace(' ', '')}"
        return [*losses(train(own, name, topology, "--loop", loop, "--dataset", "made:streamed")).values()]

    assert of_loop("custom")[:10] == pytest.approx(of_loop("fit")[:10], abs=1e-6)


@pytest.mark.long
def test_random_access_gives_the_same_bits_at_any_number_of_tasks(own: Clusters) -> None:
    hashes = {
        summary(train(own, f"elastic-{workers}", f"--workers={workers}", "--bitwise-elastic", "4"))["weights_sha256"]
        for workers in (0, 1)
    }
    assert 1 == len(hashes)


@pytest.mark.long
def test_a_killed_data_worker_comes_back_alone_and_the_bits_stay(own: Clusters) -> None:
    alone = train(own, "alone", "--workers=0", "--evaluate-every", "100000", "--max-steps", "1000", "--epochs", "100")
    own.invoke(
        "up", "--name=prepared", "--runtime=local", "--tensorboard-port=0", "--preset=made:preset", "--workers=0",
        "--data-workers=2", "--detach", "--",
        "--evaluate-every", "100000", "--max-steps", "1000", "--epochs", "100",
    )  # fmt: skip
    for task, step in (("data-worker-0", 100), ("data-dispatcher", 300)):
        own.invoke("chaos", "kill", task, "--run=prepared", f"--at-step={step}")
    own.invoke("wait", "prepared")
    run = own.run("prepared")
    assert 0 == run.generation
    restarted = {event["task"] for event in run.events() if event["event"] == "restarted"}
    assert {"data-worker-0"} <= restarted <= {"data-worker-0", "data-dispatcher"}
    assert summary(alone)["weights_sha256"] == summary(run)["weights_sha256"]
    results = json.loads(own.invoke("evaluate", "prepared", "--json"))
    assert summary(run)["metrics"]["eval_accuracy"] == pytest.approx(results["eval_accuracy"], abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("dataset", ["made:streamed", "made:indexed"])
@pytest.mark.parametrize("topology", ["--workers=1", "--workers=1 --ps=1"])
def test_data_workers_feed_several_tasks(own: Clusters, topology: str, dataset: str) -> None:
    name = f"fed{topology.replace(' ', '')}-{dataset.partition(':')[2]}"
    train(own, name, f"{topology} --data-workers=1", "--dataset", dataset)


@pytest.mark.long
def test_a_streamed_dataset_gives_the_same_bits_after_a_kill_under_three_strategies(tmp_path: Path) -> None:
    """`STREAMED_GB` sets its size in gigabytes."""
    folders = {"RUNS_DIR": str(tmp_path / "runs"), "DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "benchmarks.streamed", "--gigabytes", os.environ.get("STREAMED_GB", "1")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | folders, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert json.loads(done.stdout)["same_bits"]
