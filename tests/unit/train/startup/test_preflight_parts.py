"""What a step of several replicas, micro-batches or virtual shards cannot divide is refused before anything is started.

Here without a process: `test_preflight.py` runs the program.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.config import Optimizer, TrainConfig
from train.data.prepare import preparation
from train.startup import preflight

layers = keras.layers


class Counts(layers.Layer):
    """Assigns a variable in `call`."""

    def __init__(self, variable: Any) -> None:
        super().__init__(name="counts")
        self.count = variable

    def call(self, inputs: Any) -> Any:
        self.count.assign(self.count + 1.0)
        return inputs


class Steps(keras.Model):
    """Overrides `train_step`."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def chain(*parts: Any) -> Callable[..., keras.Model]:
    return lambda shape, outputs: keras.Sequential([keras.Input(shape), *(part() for part in parts), layers.Dense(2)])


def with_steps(shape: Any, outputs: Any) -> keras.Model:
    inputs = keras.Input(shape)
    return Steps(inputs, layers.Dense(outputs)(inputs))


def of_int32(shape: Any, outputs: Any) -> keras.Model:
    inputs = keras.Input(shape, dtype="int32")
    return keras.Model(inputs, layers.Dense(outputs)(inputs))


MODELS = {
    "of_tensorflow": chain(lambda: Counts(tf.Variable(0.0, trainable=False))),
    "summed": chain(lambda: Counts(tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM))),
    "of_keras": chain(lambda: Counts(keras.Variable(0.0, trainable=False))),
    "spectral": chain(lambda: layers.SpectralNormalization(layers.Dense(3))),
    "normalized": chain(layers.BatchNormalization),
    "with_steps": with_steps,
    "of_int32": of_int32,
}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tries a model of the above on some replicas."""
    module: Any = types.ModuleType("tried_parts")
    vars(module).update(MODELS)
    monkeypatch.setitem(sys.modules, "tried_parts", module)

    def of(model: str, replicas: int = 1, largest: int = 9, **more: Any) -> None:
        split = np.array([[0, 1], [largest, 3]]), np.array([0, 1])
        module.data = lambda: {"train": split, "test": split}
        preparation.prepare("tried_parts:data", tmp_path)
        config = TrainConfig(
            dataset="tried_parts:data", model=f"tried_parts:{model}", optimizer=Optimizer("adam"), **more
        )
        options = {"stages": 0, "pipelines": 1, "memory_bytes": None, "record": None, "strategy": "mirrored"}
        preflight.check(config, argparse.Namespace(replicas=replicas, data_dir=tmp_path, **options))

    return of


@pytest.mark.parametrize(
    ("model", "taken", "refused", "named"),
    [
        ("of_tensorflow", {}, {"replicas": 2}, "counts.count"),
        ("summed", {"replicas": 2}, {"micro_batches": 2}, "counts.count"),
        ("spectral", {"replicas": 2}, {"bitwise_elastic": 2}, "/kernel"),
        ("with_steps", {"loop": "fit", "replicas": 2}, {"loop": "fit", "micro_batches": 2}, "train_step"),
        (
            "normalized",
            {"loop": "fit", "micro_batches": 2},
            {"loop": "fit", "micro_batches": 2, "replicas": 2},
            "BatchNormalization",
        ),
        ("of_int32", {"largest": 2**31 - 1}, {"largest": 2**31}, str(2**31)),
    ],
)
def test_parts_that_cannot_be_divided_or_represented_are_refused(
    check: Callable[..., None], model: str, taken: dict[str, Any], refused: dict[str, Any], named: str
) -> None:
    check(model, **taken)
    with pytest.raises(UsageError, match=named):
        check(model, **refused)


def test_variables_of_keras_may_be_assigned_in_any_step(check: Callable[..., None]) -> None:
    check("of_keras", replicas=2, micro_batches=2)
