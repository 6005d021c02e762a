"""The optimizer that a configuration describes."""

from __future__ import annotations

from typing import Any

from tensorflow import keras

from train.config import TrainConfig


def build(config: TrainConfig) -> keras.optimizers.Optimizer:
    """Return the optimizer; call it inside the strategy's scope."""
    settings = config.optimizer
    rate: Any = settings.learning_rate
    if settings.warmup_steps and not config.callbacks:  # Keras callbacks can only set a rate that is a number
        rate = keras.optimizers.schedules.PolynomialDecay(
            settings.learning_rate / settings.warmup_steps, settings.warmup_steps, settings.learning_rate
        )
    if settings.name == "sgd":
        return keras.optimizers.SGD(rate, settings.momentum)
    return keras.optimizers.Adam(rate)
