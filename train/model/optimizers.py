"""The optimizer that a configuration describes."""

from __future__ import annotations

from typing import Any

from tensorflow import keras

from train.config import TrainConfig
from train.model import gradients


def build(config: TrainConfig) -> keras.optimizers.Optimizer:
    """Return the optimizer; call it inside the strategy's scope."""
    settings = config.optimizer
    rate: Any = config.learning_rate
    if config.warmup_steps:
        rate = keras.optimizers.schedules.PolynomialDecay(rate / config.warmup_steps, config.warmup_steps, rate)
    optimizer = keras.optimizers.SGD(rate, settings.momentum) if settings.name == "sgd" else keras.optimizers.Adam(rate)
    if settings.clip_norm or config.precision == "fp16":
        gradients.govern(optimizer, settings.clip_norm, scaled=config.precision == "fp16")
    return optimizer
