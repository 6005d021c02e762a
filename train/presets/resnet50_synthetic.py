"""ResNet-50 v1.5 on synthetic images, to measure a machine's throughput."""

from __future__ import annotations

from train.config import Optimizer, TrainConfig


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(
        dataset="train.data.synthetic:imagenet",
        model="resnet50",
        epochs=10**6,
        max_steps=500,
        steps_per_loop=10,
        checkpoint_every=10**9,  # measures only training
        evaluate_every=10**9,
        optimizer=Optimizer(name="sgd", learning_rate=0.1, scaling="linear", base_batch=256),
    )
