"""A pipeline gives the weights of one device that takes the same micro-batches, whatever happens to its stages."""

import os
import signal
from typing import Any

import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import Clusters, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

STEPS, EVERY = 30, 10
TRAINING = ("--steps-per-loop=5", "--log-every=5", "--evaluate-every=20")
PIPELINE = ("--strategy=pipeline",)
COMMON = ("--runtime=local", "--tensorboard-port=0", f"--checkpoint-every={EVERY}")


def words(name: str, *options: str, steps: int = STEPS) -> tuple[str, ...]:
    before = ("up", f"--name={name}", *COMMON, "--micro-batches=4", *options)
    return (*before, "--", *TRAINING, f"--max-steps={steps}", "--optimizer.clip-norm=0.5")


@pytest.fixture(scope="module")
def one_device(clusters) -> dict[str, Any]:
    """The summary of one device that takes the same micro-batches in order."""
    clusters.invoke(*words("one-device", "--workers=0"))
    return summary(clusters.run("one-device"))


def test_a_killed_middle_stage_and_going_on_with_one_device_must_not_change_the_weights(clusters, one_device):
    options = ("--stages=3", "--schedule=1f1b")
    process = clusters.popen(*words("killed-stage", *PIPELINE, *options, steps=STEPS - 5))
    run = clusters.run("killed-stage")

    def trains() -> bool:
        beat = run.heartbeat("worker-0")
        return beat and beat.state == "training" and beat.step >= EVERY and run.programs("worker-0").exists()

    wait_for(trains, "the middle stage to train", pause_s=0.001)
    os.kill(read_json(run.programs("worker-0"))["program"]["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert 0 == process.returncode, output
    assert ["worker-0"] == [restart["task"] for restart in summary(run)["restarts"]]
    words_after = ("up", f"--resume={run.name}", "--strategy=one", "--runtime=local", "--tensorboard-port=0")
    clusters.invoke(*words_after, "--", f"--max-steps={STEPS}")
    found = summary(run)
    assert one_device["weights_sha256"] == found["weights_sha256"]
    assert one_device["metrics"] == found["metrics"]


TEXT = ("--transformer.layers=2", "--transformer.width=32", "--transformer.context=16", "--global-batch=8")


def trained_on_text(clusters: Clusters, name: str, *options: str, training: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the summary of a small Transformer that was trained with these options."""
    preset = ("--preset=transformer_lm", *options)
    clusters.invoke(*words(name, *preset, steps=6), *TEXT, *training, timeout_s=500)
    return summary(clusters.run(name))


TIED = """
import numpy as np
from tensorflow import keras


class Tied(keras.layers.Layer):
    def __init__(self, embedding, **options):
        super().__init__(**options)
        self.embedding = embedding

    def call(self, values):
        return keras.ops.matmul(values, keras.ops.transpose(self.embedding.embeddings))


def data():
    tokens = np.random.default_rng(0).integers(0, 11, (240, 5)).astype(np.int32)
    labels = (3 * tokens + 1).astype(np.int64) % 11
    return {"train": (tokens, labels), "test": (tokens[:40], labels[:40])}


def model(feature_shape, outputs):
    inputs = keras.Input((None,), dtype="int32")
    embedding = keras.layers.Embedding(11, 16, name="embedding", embeddings_regularizer="l2")
    hidden = keras.layers.Dense(16, activation="relu", name="first")(embedding(inputs))
    hidden = keras.layers.Dense(16, name="second")(keras.layers.Dropout(0.1)(hidden))
    return keras.Model(inputs, Tied(embedding, name="tied")(hidden))
"""


@pytest.mark.long
def test_weights_that_stages_share_must_train_as_on_one_device_within_rounding(clusters, tmp_path):
    own = clusters.with_modules(tmp_path, own_data=True, tied=TIED)
    training = ("--dataset=tied:data", "--model=tied:model", "--global-batch=8", "--optimizer.schedule=cosine")
    stages = (*PIPELINE, "--stages=3")
    for name, options in {"tied": ("--workers=0",), "tied-1": stages, "tied-2": (*stages, "--workers=0")}.items():
        own.invoke(*words(name, *options), *training)
    alone, tasks, devices = (summary(own.run(name)) for name in ("tied", "tied-1", "tied-2"))
    assert tasks["weights_sha256"] == devices["weights_sha256"]
    assert alone["metrics"]["eval_loss"] == pytest.approx(tasks["metrics"]["eval_loss"], rel=1e-6)


@pytest.mark.long
def test_two_pipelines_of_two_stages_must_have_the_weights_of_two_of_one(clusters):
    two = trained_on_text(clusters, "two-by-two", *PIPELINE, "--stages=2", "--workers=3")
    one = trained_on_text(clusters, "two-by-one", *PIPELINE, "--stages=1", "--workers=1")
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["metrics"]["eval_loss"] == pytest.approx(two["metrics"]["eval_loss"], rel=1e-5)
