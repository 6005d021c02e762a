"""The optimizer that a configuration describes, and what it does with gradients."""

from __future__ import annotations

from typing import Any

from tensorflow import keras

from train.config import TrainConfig
from train.model.gradients import GradientPolicy, LossScale


def build(config: TrainConfig) -> keras.optimizers.Optimizer:
    """Return the optimizer; call it inside the strategy's scope."""
    settings = config.optimizer
    rate: Any = config.learning_rate
    if config.warmup_steps:
        rate = keras.optimizers.schedules.PolynomialDecay(rate / config.warmup_steps, config.warmup_steps, rate)
    return keras.optimizers.SGD(rate, settings.momentum) if settings.name == "sgd" else keras.optimizers.Adam(rate)


def policy(config: TrainConfig, optimizer: keras.optimizers.Optimizer) -> GradientPolicy:
    """Return what is done with gradients before this optimizer applies them; call it inside the strategy's scope."""
    return GradientPolicy(optimizer, config.optimizer.clip_norm, LossScale() if config.precision == "fp16" else None)
