"""Optimizers, step sizes, decay and averages, as far as `tests/differential` does not compare them with Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from tests.support import own_module
from train.config import TrainConfig
from train.model import optimizers
from train.saving import saved_weights
from train.saving.checkpoint import CheckpointManager
from train.settings.parts import Optimizer

PEAK = 0.1


def configured(**settings: Any) -> TrainConfig:
    return TrainConfig(optimizer=Optimizer(**{"learning_rate": PEAK, "warmup_steps": 2} | settings)).check()


def new_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


def test_the_step_size_follows_its_schedule_to_a_part_of_it_in_fewer_steps() -> None:
    """That of all steps, to 0: `tests/differential`."""
    config = configured(schedule="linear", decay_steps=4, end_share=0.5)
    schedule = optimizers.RateSchedule(config, total_steps=10)
    expected = [0.5, 0.75, 1, 0.875, 0.75, 0.625, *[0.5] * 5]
    np.testing.assert_allclose([float(schedule(step)) / PEAK for step in range(11)], expected, rtol=1e-6)


def test_a_pattern_that_names_no_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="--optimizer.no-decay 'gamma'"):
        optimizers.build_for_model(configured(weight_decay=0.1, no_decay="gamma"), new_model())


@pytest.mark.parametrize("evaluate", [True, False])
def test_evaluation_uses_the_averages_if_requested(tmp_path: Path, evaluate: bool) -> None:
    config, model = configured(ema=0.5, ema_evaluate=evaluate), new_model()
    optimizer, kept = optimizers.build_for_model(config, model, total_steps=8), list[Any]()
    first = model.trainable_variables[0]
    for step in range(2):
        optimizer.apply([tf.sin(step + one.value) for one in model.trainable_variables], model.trainable_variables)
        kept.append(first.numpy())  # the first weights are the first averages
    saves = CheckpointManager(model, optimizer, tf.Variable(2, dtype=tf.int64), tmp_path, keep=1, writes=True)
    saves.save(2)
    saves.wait()
    expected = sum(kept) / 2 if evaluate else kept[1]
    model.layers[-1].trainable = False  # as a callback may do
    with optimizers.with_averages(config, model, optimizer):
        np.testing.assert_allclose(first, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept[1], first)
    restored = new_model()
    saved_weights.load_evaluated(config, restored, str(tmp_path / "ckpt-2"))
    np.testing.assert_allclose(restored.trainable_variables[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["nothing", "scaled"])
def test_a_function_that_returns_no_optimizer_or_one_that_unscales_gradients_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    own_module.put(monkeypatch, "own_optimizers", nothing=lambda rate: rate, scaled=lambda _rate: scaled)
    with pytest.raises(UsageError, match=f"--optimizer.name 'own_optimizers:{name}' returned"):
        optimizers.build_optimizer(configured(name=f"own_optimizers:{name}"))
