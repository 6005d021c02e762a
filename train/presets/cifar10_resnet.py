"""CIFAR-10 with ResNet-20 from TFDS, with the batch size and decay of He et al. 2015. Not verified on real data."""

from __future__ import annotations

from train.config import Optimizer, TrainConfig


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(
        source="stream",
        dataset="cifar10",
        model="resnet20",
        global_batch=128,
        epochs=160.0,
        optimizer=Optimizer(
            name="sgd",
            learning_rate=0.1,
            warmup_steps=400,
            schedule="cosine",
            nesterov=True,
            weight_decay=5e-4,
            no_decay="bias,gamma,beta",
        ),
    )
