"""What the recovery promises, with real processes: a bit flips, a task dies, a loss diverges."""

import functools
import random
import re
from collections.abc import Callable

import pytest

from tests.e2e.scenario import Clusters, summary

pytestmark = pytest.mark.usefixtures("data")

WRONG = """
import os, signal
from tensorflow import keras

class Crashes(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= {step}:
            os.kill(os.getpid(), signal.SIGSEGV)

def crashing(run, task):
    return [Crashes()] if task == "worker-0" else [keras.callbacks.Callback()]

def crashing_once(run, task):
    return crashing(run, task) if os.environ["GENERATION"] == "0" else [keras.callbacks.Callback()]

class Halves(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

def halving(run, task):
    return [Halves()] if task == "chief" else [keras.callbacks.Callback()]

def harmless(run, task):
    return [keras.callbacks.Callback()]

def linear(shape, outputs):  # no activation turns NaN into 0
    return keras.Sequential([keras.layers.Input(shape), keras.layers.Flatten(), keras.layers.Dense(outputs)])
"""


@pytest.fixture
def own(clusters, tmp_path) -> Clusters:
    """Clusters whose user has code that goes wrong; the crash is at a random step."""
    step = random.randint(20, 40)  # pytest shows it where the test fails
    (tmp_path / "step").write_text(str(step))
    return clusters.with_modules(tmp_path, wrong=WRONG.format(step=step))


LENGTH = "-- --max-steps=120"


@pytest.fixture(scope="module")
def undisturbed(clusters) -> Callable[[str], str]:
    """Returns the weights of an undisturbed training of this length; how often it saves changes none."""

    @functools.cache
    def train(options: str) -> str:
        name = "-".join(["calm", *re.findall(r"\w+", options)])
        return summary(clusters.up(name, f"{options} {LENGTH}"))["weights_sha256"]

    return train


@pytest.mark.extended
def test_a_flipped_bit_must_be_found_before_it_is_saved(clusters, undisturbed):
    topology, task = "--workers=2", random.choice(["chief", "worker-0", "worker-1"])
    flipped = clusters.up("flipped", f"--detach {topology} --checkpoint-every=30 {LENGTH}")
    clusters.invoke("chaos", "flip", task, "--run=flipped", "--at-step=40")
    clusters.invoke("wait", "flipped")
    (restart,) = summary(flipped)["restarts"]
    assert task == restart["task"]
    assert "silent corruption" in restart["cause"]
    assert undisturbed(topology) == summary(flipped)["weights_sha256"]


@pytest.mark.parametrize(
    ("words", "whole", "source"),
    [
        # What the task lost comes from another.
        pytest.param("--workers=2", True, "memory", marks=pytest.mark.extended),
        pytest.param("--workers=1 --loop=fit", False, "memory", marks=pytest.mark.long),
        pytest.param("--strategy=pipeline --stages=2 --micro-batches=2", False, "memory", marks=pytest.mark.long),
        pytest.param("--strategy=pipeline --stages=2 --micro-batches=2", True, "", marks=pytest.mark.long),
        pytest.param("--workers=1 --no-memory-snapshots", False, "", marks=pytest.mark.long),
    ],
)
def test_a_killed_task_must_continue_from_memory(clusters, undisturbed, words, whole, source):
    """No checkpoint is saved before the fault, so that only memory has the state."""
    name = "-".join([*re.findall(r"\w+", words), f"{whole:d}"])
    run = clusters.up(name, f"--detach {words} --checkpoint-every=1000 {LENGTH}")
    fault = ("chaos", "kill", random.choice(["chief", "worker-0"]), f"--run={name}", "--at-step=40")
    clusters.invoke(*fault, *(["--whole"] if whole else []))
    clusters.invoke("wait", name)
    (restart,) = summary(run)["restarts"]
    assert source == restart.get("restored_from", "")
    assert undisturbed(words) == summary(run)["weights_sha256"]


@pytest.mark.long
def test_weights_that_a_callback_of_the_chief_changes_at_the_end_must_not_count_as_corrupted(own):
    run = own.up("halved", "--workers=1 -- --max-steps=10 --callbacks=wrong:halving")
    assert [] == summary(run)["restarts"]


# test_loop.py tests the custom loop's error; test_agent.py, that it is not retried.
@pytest.mark.extended
@pytest.mark.parametrize("loop", ["fit", pytest.param("custom", marks=pytest.mark.long)])
def test_a_loss_that_diverges_must_end_the_run_at_once_and_name_the_step(own, loop):
    training = ("--model=wrong:linear", "--optimizer.name=sgd", "--optimizer.learning-rate=1e38")
    run = own.up(f"nan-{loop}", f"--workers=1 --loop={loop}", training=training, expect=1)
    failed = summary(run)
    assert ("failed", [], 0) == (failed["state"], failed["restarts"], run.generation)
    assert re.search(r"loss is (nan|inf) at step \d+", failed["cause"]["error"])


@pytest.mark.long
def test_single_steps_after_a_failure_must_not_change_a_bit(own):
    weights = []
    for name, callbacks in (("once", "crashing_once"), ("calm", "harmless")):
        training = ("--steps-per-loop=25", "--max-steps=60", f"--callbacks=wrong:{callbacks}")
        run = own.up(name, "--workers=1 --checkpoint-every=15", training=training)
        weights.append(summary(run)["weights_sha256"])
    assert own.run("once").generations()[1].single_steps_from is not None
    assert weights[0] == weights[1]
