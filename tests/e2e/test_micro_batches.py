"""`--micro-batches`: the same bits under every strategy that has as many replicas, in both loops."""

import pytest

from tests.e2e.scenario import Clusters, losses, summary

pytestmark = pytest.mark.usefixtures("data")

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
    (tmp_path / "guarded.py").write_text(MODEL)
    own = Clusters(clusters.runs_dir, {"PYTHONPATH": str(tmp_path)})
    training = f"{MICRO} -- --max-steps {STEPS} --model guarded:model"
    devices = own.up("devices", f"--workers=0 --devices=2 {training}")
    tasks = own.up("tasks", f"--workers=1 {training}")
    assert losses(devices) == losses(tasks)
    assert STEPS == len(losses(tasks))
    assert summary(devices)["weights_sha256"] == summary(tasks)["weights_sha256"]
