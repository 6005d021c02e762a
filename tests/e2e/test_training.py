"""Whole trainings: from a stream, in micro-batches on tasks and devices, on one core, and for three epochs."""

import os

import pytest

from tests.e2e.scenario import Clusters, summary

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("data")]


def test_a_streamed_run_must_continue_in_the_middle_of_an_epoch(clusters):
    words = "--workers=0 -- --source stream --max-steps"
    whole = clusters.up("streamed", f"{words} 30")
    halved = clusters.up("streamed-halves", f"{words} 15")
    clusters.invoke("up", "--resume=streamed-halves", "--runtime=local", "--tensorboard-port=0", "--", "--max-steps=30")
    assert whole.losses() == halved.losses()
    assert summary(whole)["weights_sha256"] == summary(halved)["weights_sha256"]


def test_three_epochs_must_end_above_088(clusters):
    run = clusters.up("full", training=(), timeout_s=500)
    assert summary(run)["metrics"]["eval_accuracy"] > 0.88


def test_parameter_servers_must_train_on_one_core(clusters):
    core = str(min(os.sched_getaffinity(0)))
    Clusters(clusters.runs_dir, limits=("taskset", "--cpu-list", core)).up("one-core", "--workers=2 --ps=1")
    assert "succeeded" == summary(clusters.run("one-core"))["state"]


MICRO = "--micro-batches=4"
STEPS = 12
MODEL = """
from tensorflow import keras


def model(feature_shape, num_outputs):
    layers, l2 = keras.layers, keras.regularizers.L2(1e-3)
    hidden = [layers.Dense(16, kernel_regularizer=l2), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input(feature_shape), layers.Flatten(), *hidden, layers.Dense(num_outputs)])
"""
"""With all that goes wrong on several replicas without its guard."""


def test_two_tasks_must_give_the_bits_of_two_devices_wherever_they_are(clusters, tmp_path):
    own = clusters.with_modules(tmp_path, guarded=MODEL)
    training = f"{MICRO} -- --max-steps {STEPS} --model guarded:model"
    devices = own.up("devices", f"--workers=0 --devices=2 {training}")
    tasks = own.up("tasks", f"--workers=1 {training}")
    assert devices.losses() == tasks.losses()
    assert STEPS == len(tasks.losses())
    assert summary(devices)["weights_sha256"] == summary(tasks)["weights_sha256"]
