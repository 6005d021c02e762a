"""Made-up examples, to measure speed alone: nothing is downloaded, and nothing can be learned from them."""

from __future__ import annotations

import numpy as np

CLASSES = 1000
TRAIN, TEST = 512, 8
"""Images: repeated epoch after epoch, and as many as one replica can take at once."""


def imagenet() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return random images `[N, 224, 224, 3] uint8` of ImageNet's size and number of classes."""
    random = np.random.default_rng(0)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels_N = random.integers(0, CLASSES, count)
        labels_N[0] = CLASSES - 1  # how many classes there are is read off the labels
        return random.integers(0, 256, (count, 224, 224, 3), dtype=np.uint8), labels_N

    return {"train": split(TRAIN), "test": split(TEST)}
