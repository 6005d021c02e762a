"""ResNet-50 v1.5 on synthetic images, to measure a machine's throughput."""

from typing import Any

from train.config import Optimizer, TrainConfig

CLASSES = 1000
TRAIN, TEST = 512, 8
"""Numbers of images; the test images fit one replica batch."""


def imagenet() -> dict[str, Any]:
    """Return random images `[N, 224, 224, 3] uint8` of ImageNet's size and number of classes."""
    import numpy as np

    random = np.random.default_rng(0)

    def split(count: int) -> tuple[Any, Any]:
        labels_N = random.integers(0, CLASSES, count)
        labels_N[0] = CLASSES - 1  # the number of classes follows from the labels
        return random.integers(0, 256, (count, 224, 224, 3), dtype=np.uint8), labels_N

    return {"train": split(TRAIN), "test": split(TEST)}


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(
        dataset="train.presets.resnet50_synthetic:imagenet",
        model="resnet50",
        epochs=10**6,
        max_steps=500,
        steps_per_loop=10,
        checkpoint_every=10**9,  # measures only training
        evaluate_every=10**9,
        optimizer=Optimizer(name="sgd", learning_rate=0.1, scaling="linear", base_batch=256),
    )
