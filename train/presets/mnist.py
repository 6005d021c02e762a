"""MNIST with the two-conv CNN."""

from train.config import TrainConfig


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(dataset="mnist")
