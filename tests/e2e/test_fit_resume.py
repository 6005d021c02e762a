"""`--loop fit`: a run killed inside of an epoch ends with the bits of one that was not; damaged data ends a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import Clusters, step_of, summary
from tests.waiting import wait_for

STEPS = 600
PARTS = '''
"""Data and a model with all that a resume could get wrong."""

import numpy as np
from tensorflow import keras


def data():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(500, 8)).astype("float32"), random.integers(0, 3, 500)
    return {"train": (features[:400], labels[:400]), "test": (features[400:], labels[400:])}


def model(feature_shape, num_outputs):
    layers = keras.layers
    hidden = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input(feature_shape), *hidden, layers.Dense(num_outputs)])


def callbacks(run_dir, task):
    return [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=3, factor=0.7)]
'''


@pytest.fixture(scope="module")
def own(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Clusters:
    """Clusters whose user has these parts."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "fit_parts.py").write_text(PARTS)
    data = tmp_path_factory.mktemp("data")
    return Clusters(clusters.runs_dir, {"PYTHONPATH": str(folder), "DATA_DIR": str(data)})


def words(name: str, workers: int) -> tuple[str, ...]:
    """Return the command that trains; 16 or 17 steps are an epoch."""
    options = (f"--name={name}", f"--workers={workers}", "--runtime=local", "--tensorboard-port=0", "--loop=fit")
    parts = (f"--{part}=fit_parts:{part}" for part in ("model", "callbacks"))
    training = (f"--max-steps={STEPS}", "--epochs=100", "--global-batch=24", "--log-every=5", "--steps-per-loop=5")
    return ("up", *options, "--checkpoint-every=50", "--", "--dataset=fit_parts:data", *parts, *training)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_killed_inside_of_an_epoch_must_end_with_the_same_bits(own: Clusters, workers: int) -> None:
    own.invoke(*words(f"whole-{workers}", workers))
    process = own.popen(*words(f"killed-{workers}", workers))
    run = own.run(f"killed-{workers}")
    wait_for(lambda: step_of(run) >= 120, "step 120", pause_s=0.01)
    os.kill(read_json(run.programs("chief"))["program"]["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert 0 == process.returncode, output
    ended, whole = summary(run), summary(own.run(f"whole-{workers}"))
    assert 1 == len(ended["restarts"])
    assert (STEPS, whole["weights_sha256"]) == (ended["steps"], ended["weights_sha256"])
    assert whole["metrics"] == ended["metrics"]


def test_a_flipped_bit_of_prepared_data_must_end_the_run_at_once(own: Clusters) -> None:
    own.invoke(*words("prepared", 0), "--max-steps=1")
    [path] = Path(own.environment["DATA_DIR"]).glob("arrays/fit_parts*/train_features.bin")
    good = path.read_bytes()
    path.write_bytes(good[:4000] + bytes([good[4000] ^ 16]) + good[4001:])
    told = own.invoke(*words("damaged", 1), expect=1)
    [line] = {line for line in told.splitlines() if "train_features.bin" in line}
    assert "in block 0 " in line or "not what was prepared" in line
    assert "`invoke data.prepare --name fit_parts:data --fresh`" in line
    assert not own.run("damaged").path.exists()  # a model of one's own is tried on the data before anything starts
    own.invoke("data.prepare", "--name=fit_parts:data", "--fresh")
    assert good == path.read_bytes()
