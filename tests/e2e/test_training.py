"""Whole trainings: from a stream, on truncated data, in micro-batches, for three epochs, and scaled."""

import os
import subprocess
import sys

import pytest

from tests.e2e.scenario import DATA, ROOT, Clusters, step_of, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")


@pytest.mark.long
def test_a_streamed_run_must_go_on_in_the_middle_of_an_epoch(clusters):
    words = "--workers=0 -- --source stream --max-steps"
    whole = clusters.up("streamed", f"{words} 30")
    halved = clusters.up("streamed-halves", f"{words} 15")
    clusters.invoke("up", "--resume=streamed-halves", "--runtime=local", "--tensorboard-port=0", "--", "--max-steps=30")
    assert whole.losses() == halved.losses()
    assert summary(whole)["weights_sha256"] == summary(halved)["weights_sha256"]


def test_truncated_data_must_end_in_one_line(clusters, tmp_path):
    arrays = tmp_path / "arrays" / "fashion_mnist-3.0.1"
    arrays.mkdir(parents=True)
    for path in (DATA / "arrays" / "fashion_mnist-3.0.1").iterdir():
        (arrays / path.name).write_bytes(path.read_bytes())
    features = arrays / "train_features.bin"
    with features.open("r+b") as file:
        file.truncate(1000)
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "up", "--name=truncated", "--runtime=local", "--tensorboard-port=0"],
        cwd=ROOT,
        env=os.environ | {"RUNS_DIR": str(clusters.runs_dir), "DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 != done.returncode
    assert 1 == done.stderr.count("\n"), done.stderr
    assert features.name in done.stderr
    assert "--fresh" in done.stderr
    assert not clusters.run("truncated").path.exists()


@pytest.mark.long
def test_three_epochs_must_end_above_088(clusters):
    clusters.invoke("up", "--name=full", "--runtime=local", "--tensorboard-port=0", timeout_s=500)
    ended = summary(clusters.run("full"))
    assert ended["metrics"]["eval_accuracy"] > 0.88


@pytest.mark.long
def test_parameter_servers_must_be_scaled_with_their_evaluator(clusters):
    run = clusters.up("scaled", "--workers=1 --ps=1 --evaluator --detach -- --max-steps 200 --global-batch 192")
    wait_for(lambda: step_of(run) >= 6, "step 6")
    for sizes in (("--workers=2",), ("--workers=1", "--ps=2")):
        assert "every task trains again after" in clusters.invoke("scale", *sizes, "--run=scaled")
    clusters.invoke("wait", "--timeout=200", "scaled")
    first, second = (event.step for event in run.events() if event.event == "scaled")
    assert 6 <= first < second < 200
    assert list(range(1, 201)) == list(run.losses())
    assert run.losses()[200] < run.losses()[1]
    ended = summary(run)
    assert ("succeeded", "ParameterServerStrategy", 1) == tuple(ended[k] for k in ("state", "strategy", "replicas"))
    assert {"chief": 0, "worker-0": 0, "ps-0": 0, "ps-1": 0, "evaluator": 0} == ended["tasks"]


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
