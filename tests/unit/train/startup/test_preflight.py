"""Users' models and losses, tried on the machine that starts the run, which reports errors before the start."""

import subprocess
from collections.abc import Callable

import pytest

from cluster.contract import spec
from cluster.host.launch import configuration
from cluster.system.errors import TimedOut, UsageError
from train.config import Optimizer, TrainConfig
from train.data.prepare import preparation

PARTS = """
import sys, time
import numpy as np
import tensorflow as tf
from tensorflow import keras

def data():
    split = np.ones((4, 2)), np.array([0, 1, 0, 1])
    return {"train": split, "test": split}

def good(shape, outputs): return keras.Sequential([keras.Input(shape), keras.layers.Dense(outputs)])
def wide(shape, outputs): return good(shape, outputs + 1)
def narrow(shape, outputs): return keras.Sequential([keras.Input((7,)), keras.layers.Dense(outputs)])
def none(shape, outputs): print("no model")
def exits(shape, outputs): sys.exit(0)
def sleeps(shape, outputs): time.sleep(600)
def each(labels, outputs): return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
def scalar(labels, outputs): return tf.reduce_mean(each(labels, outputs))
class Assigns(keras.layers.Layer):
    def build(self, shape): self.seen = self.add_weight(initializer="zeros", trainable=False, name="seen")
    def call(self, inputs):
        tf.cond(tf.reduce_any(inputs > 0), lambda: self.seen.assign(1.0), lambda: 1.0)
        return inputs
def conditional(shape, outputs):
    return keras.Sequential([keras.Input(shape), Assigns(), keras.layers.Dense(outputs)])
def accumulating(rate): return keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
def fails(labels, outputs): raise ValueError("a\\x1b[2Jb")
"""


@pytest.fixture
def check(tmp_path, monkeypatch) -> Callable[..., None]:
    """Tries a configuration of these parts."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_tried.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path / "own")
    preparation.prepare("own_tried:data", tmp_path / "data")

    def of(model: str, loss: str = "own_tried:each", optimizer: str = "adam", workers: int = 0) -> None:
        settings = Optimizer(optimizer)
        config = TrainConfig(dataset="own_tried:data", model=model, loss=loss, optimizer=settings).to_json()
        configuration.check(config, spec.build(workers=workers), [str(tmp_path / "own")], tmp_path / "data")

    return of


def test_matching_parts_pass(check, capfd):
    check("own_tried:good")
    assert "" == capfd.readouterr().out


@pytest.mark.parametrize(
    ("model", "loss", "named"),
    [
        ("own_tried:wide", "sparse_categorical_crossentropy", "(None, 2)"),
        ("own_tried:none", "own_tried:each", "--model"),
        ("own_tried:exits", "own_tried:each", "sys.exit(0)"),
        ("own_tried:good", "own_tried:scalar", "--loss"),
        ("own_tried:good", "own_tried:fails", "--loss"),
    ],
)
def test_parts_that_do_not_match_are_refused(check, model, loss, named):
    with pytest.raises(UsageError) as refused:
        check(model, loss)
    assert named in str(refused.value)
    assert str(refused.value).isprintable()


def test_parts_for_one_replica_are_refused_on_several(check):
    """An optimizer that accumulates by itself, and a layer that assigns its state inside a condition."""
    check("own_tried:conditional", optimizer="own_tried:accumulating")
    with pytest.raises(UsageError, match="gradient_accumulation_steps"):
        check("own_tried:good", optimizer="own_tried:accumulating", workers=1)
    with pytest.raises(UsageError, match="/seen"):
        check("own_tried:conditional", workers=1)


def test_a_model_that_never_returns_is_ended(check, monkeypatch):
    monkeypatch.setenv("PRESET_TIMEOUT_S", "15")
    with pytest.raises(TimedOut, match="PRESET_TIMEOUT_S"):
        check("own_tried:sleeps")


def test_built_in_parts_are_not_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", None)
    for config in (TrainConfig(), TrainConfig(dataset="train.data.synthetic:imagenet", model="resnet50")):
        configuration.check(config.to_json(), spec.build(workers=0), [], tmp_path)
