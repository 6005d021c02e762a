"""Optimizers, step sizes, decay and averages: the right numbers, and the same bits after a resume."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import optimizers
from train.saving import saved_weights
from train.saving.checkpoint import CheckpointManager
from train.settings.optimization import Optimizer

PEAK = 0.1


def configured(**settings: Any) -> TrainConfig:
    return TrainConfig(optimizer=Optimizer(**{"learning_rate": PEAK, "warmup_steps": 2} | settings)).check()


def new_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


class Trained:
    """A training of a small model on one device, and its checkpoint."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
            self.model = new_model()
            self.optimizer = optimizers.build_for_model(config, self.model, total_steps=8)
            step = tf.Variable(0, dtype=tf.int64)
        self.checkpoint = CheckpointManager(self.model, self.optimizer, step, folder, keep=3, writes=True)

    def steps(self, first: int, last: int) -> Trained:
        for step in range(first, last):
            gradients = [tf.sin(step + one) for one in self.weights]
            self.optimizer.apply(gradients, self.model.trainable_variables)
        return self

    def save(self, step: int) -> None:
        self.checkpoint.save(step)
        self.checkpoint.wait()

    @property
    def weights(self) -> list[Any]:
        return [variable.value for variable in self.model.trainable_variables]

    @property
    def state(self) -> list[bytes]:
        return [one.numpy().tobytes() for one in (*self.model.variables, *self.optimizer.variables)]


def rates(**settings: Any) -> list[float]:
    schedule = optimizers.RateSchedule(configured(**settings), total_steps=10)
    return [float(schedule(step)) for step in range(11)]


@pytest.mark.parametrize(
    ("settings", "after"),
    [
        ({}, [1.0] * 9),
        ({"schedule": "linear"}, [1 - at / 8 for at in range(9)]),
        ({"schedule": "linear", "decay_steps": 4, "end_share": 0.5}, [1, 0.875, 0.75, 0.625, *[0.5] * 5]),
        ({"schedule": "cosine"}, [(1 + math.cos(math.pi * at / 8)) / 2 for at in range(9)]),
    ],
)
def test_the_step_size_follows_its_schedule_after_the_warm_up(settings: dict[str, Any], after: list[float]) -> None:
    expected = [PEAK / 2, 0.75 * PEAK, *(PEAK * share for share in after)]
    np.testing.assert_allclose(rates(**settings), expected, atol=1e-7)


def test_callbacks_may_set_a_constant_step_size_alone() -> None:
    settable = optimizers.build_optimizer(TrainConfig(callbacks="own:callbacks"))
    settable.learning_rate = 0.5
    scheduled = optimizers.build_optimizer(
        TrainConfig(callbacks="own:callbacks", optimizer=Optimizer(schedule="cosine"))
    )
    with pytest.raises(TypeError):
        scheduled.learning_rate = 0.5


def test_a_pattern_that_names_no_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--optimizer.no-decay 'gamma'"):
        Trained(configured(weight_decay=0.1, no_decay="gamma"), tmp_path)


@pytest.mark.parametrize("evaluate", [True, False])
def test_evaluation_uses_the_averages_if_requested(tmp_path: Path, evaluate: bool) -> None:
    config = configured(ema=0.5, ema_evaluate=evaluate)
    trained = Trained(config, tmp_path)
    kept = [one.numpy() for one in trained.steps(0, 1).weights]  # the first weights are the first averages
    trained.steps(1, 2).save(2)
    last = [one.numpy() for one in trained.weights]
    expected = [(mean + new) / 2 for mean, new in zip(kept, last, strict=True)] if evaluate else last
    first = trained.weights[0]
    trained.model.layers[-1].trainable = False  # as a callback may do
    with optimizers.with_averages(config, trained.model, trained.optimizer):
        np.testing.assert_allclose(first, expected[0], rtol=1e-6)
    np.testing.assert_array_equal(last[0], first)
    restored = new_model()
    saved_weights.load_evaluated(config, restored, str(tmp_path / "ckpt-2"))
    np.testing.assert_allclose(restored.trainable_variables[0], expected[0], rtol=1e-6)


# An optimizer of the user's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The user's module `own_optimizers`."""
    module = ModuleType("own_optimizers")
    module.nadam = lambda rate: keras.optimizers.Nadam(rate, use_ema=True)  # type: ignore[attr-defined]
    module.nothing = lambda rate: rate  # type: ignore[attr-defined]
    module.scaled = lambda rate: keras.optimizers.LossScaleOptimizer(module.nadam(rate))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_optimizers", module)
    return module


@pytest.mark.usefixtures("own")
def test_a_users_function_makes_the_optimizer_with_the_schedule(tmp_path: Path) -> None:
    config = configured(name="own_optimizers:nadam", schedule="cosine")
    whole = Trained(config, tmp_path).steps(0, 4)
    assert isinstance(whole.optimizer, keras.optimizers.Nadam)
    half = Trained(config, tmp_path).steps(0, 2)
    half.save(2)
    resumed = Trained(config, tmp_path)
    assert 2 == resumed.checkpoint.restore()
    assert whole.state == resumed.steps(2, 4).state


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["nothing", "scaled"])
def test_a_function_that_returns_no_optimizer_or_one_that_unscales_gradients_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--optimizer.name 'own_optimizers:{name}' returned"):
        optimizers.build_optimizer(configured(name=f"own_optimizers:{name}"))
