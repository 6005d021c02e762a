"""What the recovery promises, with real processes: a step fails whenever it comes, a loss diverges, a model sleeps."""

import random
import re

import pytest

from tests.e2e.scenario import Clusters, summary

pytestmark = pytest.mark.usefixtures("data")

OPTIONS = ("--runtime=local", "--tensorboard-port=0")
WRONG = """
import os, signal, time
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

def sleeping(shape, outputs):
    if "GENERATION" in os.environ:  # not where the model is tried before anything starts
        time.sleep(3600)
    return linear(shape, outputs)
"""


@pytest.fixture
def own(clusters, tmp_path) -> Clusters:
    """Clusters whose user has code that goes wrong; the crash is at a random step."""
    step = random.randint(20, 40)  # pytest shows it where the test fails
    (tmp_path / "step").write_text(str(step))
    return clusters.with_modules(tmp_path, wrong=WRONG.format(step=step))


@pytest.mark.parametrize("topology", ["--workers=2", "--workers=0 --devices=2"])
def test_a_flipped_bit_must_be_found_before_it_is_saved(clusters, topology):
    kind = "devices" if "devices" in topology else "tasks"
    task = random.choice(["chief", "worker-0", "worker-1"]) if kind == "tasks" else "chief"
    words = f"{topology} --checkpoint-every=30 -- --max-steps=120"
    whole = clusters.up(f"whole-{kind}", words)
    flipped = clusters.up(f"flipped-{kind}", f"--detach {words}")
    clusters.invoke("chaos", "flip", task, f"--run=flipped-{kind}", "--at-step=40")
    clusters.invoke("wait", f"flipped-{kind}")
    (restart,) = summary(flipped)["restarts"]
    assert task == restart["task"]
    assert "silent corruption" in restart["cause"]
    assert summary(whole)["weights_sha256"] == summary(flipped)["weights_sha256"]


@pytest.mark.parametrize(
    ("words", "whole", "source"),
    [
        ("--workers=2", True, "memory"),  # what the task lost comes from another
        pytest.param("--workers=1 --loop=fit", False, "memory", marks=pytest.mark.long),
        pytest.param("--strategy=pipeline --stages=2 --micro-batches=2", False, "memory", marks=pytest.mark.long),
        pytest.param("--strategy=pipeline --stages=2 --micro-batches=2", True, "", marks=pytest.mark.long),
        pytest.param("--workers=1 --no-memory-snapshots", False, "", marks=pytest.mark.long),
    ],
)
def test_a_killed_task_must_continue_from_memory(clusters, words, whole, source):
    """No checkpoint is saved before the fault, so that only memory has the state."""
    words = f"{words} --checkpoint-every=1000 -- --max-steps=120"
    name = "-".join(re.findall(r"\w+", words)[:7]) + f"-{whole:d}"
    undisturbed = clusters.up("calm-" + name, words)
    run = clusters.up(name, f"--detach {words}")
    fault = ("chaos", "kill", random.choice(["chief", "worker-0"]), f"--run={name}", "--at-step=40")
    clusters.invoke(*fault, *(["--whole"] if whole else []))
    clusters.invoke("wait", name)
    (restart,) = summary(run)["restarts"]
    assert source == restart.get("restored_from", "")
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]


def test_weights_that_a_callback_of_the_chief_changes_at_the_end_must_not_count_as_corrupted(own):
    run = own.up("halved", "--workers=1 -- --max-steps=10 --callbacks=wrong:halving")
    assert [] == summary(run)["restarts"]


def test_a_step_that_crashes_whenever_it_comes_must_be_named_after_a_few_attempts(own, tmp_path):
    step = int((tmp_path / "step").read_text())
    words = ("--workers=1", "--checkpoint-every=7", "--max-restarts=1")
    training = ("--", "--steps-per-loop=25", "--callbacks=wrong:crashing", "--max-steps=60")
    output = own.invoke("up", "--name=crash", *OPTIONS, *words, *training, expect=1)
    run = own.run("crash")
    cause = summary(run)["cause"]
    # The chief may have saved a checkpoint after that step, from which the first step crashes again.
    assert step - 1 <= cause["step"] <= step + 7, output
    assert run.generation <= 2
    assert "worker-0" == cause["task"]
    assert "SIGSEGV" in cause["error"]
    assert "on_train_batch_end" in cause["error"]


# The custom loop's error is in test_loop.py, and that it is not retried in test_agent.py.
@pytest.mark.parametrize("loop", ["fit", pytest.param("custom", marks=pytest.mark.long)])
def test_a_loss_that_diverges_must_end_the_run_at_once_and_name_the_step(own, loop):
    training = ("--", "--model=wrong:linear", "--optimizer.name=sgd", "--optimizer.learning-rate=1e38")
    output = own.invoke("up", f"--name=nan-{loop}", *OPTIONS, "--workers=1", f"--loop={loop}", *training, expect=1)
    run = own.run(f"nan-{loop}")
    failed = summary(run)
    assert ("failed", [], 0) == (failed["state"], failed["restarts"], run.generation), output
    assert re.search(r"loss is (nan|inf) at step \d+", failed["cause"]["error"])


@pytest.mark.long
def test_single_steps_after_a_failure_must_not_change_a_bit(own):
    weights = []
    for name, callbacks in (("once", "crashing_once"), ("calm", "harmless")):
        training = ("--", "--steps-per-loop=25", "--max-steps=60", f"--callbacks=wrong:{callbacks}")
        own.invoke("up", f"--name={name}", *OPTIONS, "--workers=1", "--checkpoint-every=15", *training)
        weights.append(summary(own.run(name))["weights_sha256"])
    assert own.run("once").generations()[1].single_steps_from is not None
    assert weights[0] == weights[1]


@pytest.mark.long
def test_a_model_function_that_sleeps_must_be_found(own):
    words = ("--workers=1", "--hang-timeout=10", "--max-restarts=0", "--", "--model=wrong:sleeping", "--max-steps=100")
    own.invoke("up", "--name=sleep", *OPTIONS, *words, expect=1, timeout_s=300)
    cause = summary(own.run("sleep"))["cause"]
    assert "no first step for 10" in cause["error"]
