"""Random examples to measure speed."""

from __future__ import annotations

import numpy as np

CLASSES = 1000
TRAIN, TEST = 512, 8
"""Numbers of images; the test images fit one replica batch."""


def imagenet() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return random images `[N, 224, 224, 3] uint8` of ImageNet's size and number of classes."""
    random = np.random.default_rng(0)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels_N = random.integers(0, CLASSES, count)
        labels_N[0] = CLASSES - 1  # the number of classes follows from the labels
        return random.integers(0, 256, (count, 224, 224, 3), dtype=np.uint8), labels_N

    return {"train": split(TRAIN), "test": split(TEST)}
