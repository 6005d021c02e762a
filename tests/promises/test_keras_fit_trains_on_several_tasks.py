"""`--loop fit` on several tasks: a run killed inside an epoch ends with the bits of an undisturbed one."""

import pytest

from cluster.contract.run.folder import RunFolder
from tests.e2e.scenario import Clusters, summary

STEPS, KILLED_AT = 60, 40
PARTS = f'''
"""Data and a model with all that a resume could get wrong."""

import os
import signal

import numpy as np
from tensorflow import keras


def data():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(500, 8)).astype("float32"), random.integers(0, 3, 500)
    return {{"train": (features[:400], labels[:400]), "test": (features[400:], labels[400:])}}


def model(feature_shape, num_outputs):
    layers = keras.layers
    hidden = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input(feature_shape), *hidden, layers.Dense(num_outputs)])


class Kill(keras.callbacks.Callback):
    def __init__(self, does):
        super().__init__()
        self._does = does

    def on_train_batch_end(self, batch, logs=None):
        if self._does and self.model.optimizer.iterations.numpy() >= {KILLED_AT}:
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks(run_dir, task):
    # No epoch counts as better, so that each but the first lowers the rate.
    lowers = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.7, min_delta=100)
    decays = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    first = (os.environ["GENERATION"], task) == ("0", "chief")
    return [lowers, decays, Kill(first and run_dir.name.startswith("killed"))]
'''


@pytest.fixture(scope="module")
def own(clusters, tmp_path_factory) -> Clusters:
    """Clusters of a user who has these parts."""
    return clusters.with_modules(tmp_path_factory.mktemp("own"), own_data=True, fit_parts=PARTS)


def train(own: Clusters, name: str, workers: int) -> RunFolder:
    """Train to the end; 16 or 17 steps are an epoch, so checkpoints are inside epochs."""
    options = (f"--workers={workers}", "--loop=fit", "--checkpoint-every=15")
    parts = ("--dataset=fit_parts:data", "--model=fit_parts:model", "--callbacks=fit_parts:callbacks")
    training = (f"--max-steps={STEPS}", "--epochs=100", "--global-batch=24", "--log-every=5", "--steps-per-loop=5")
    return own.up(name, *options, training=(*parts, *training))


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_run_killed_inside_of_an_epoch_must_end_with_the_same_bits(own, workers):
    whole = summary(train(own, f"whole-{workers}", workers))
    run = train(own, f"killed-{workers}", workers)
    ended = summary(run)
    (restart,) = ended["restarts"]
    assert "chief" == restart["task"]
    (restored_at,) = [event.step for event in run.events() if event.event == "restored"]
    assert 0 < restored_at < KILLED_AT
    assert (STEPS, whole["weights_sha256"]) == (ended["steps"], ended["weights_sha256"])
    assert whole["metrics"] == ended["metrics"]
