"""MNIST with the two-conv CNN."""

from __future__ import annotations

from train.config import TrainConfig


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(dataset="mnist")
