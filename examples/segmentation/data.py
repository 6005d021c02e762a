"""Noisy pictures of a disc and a square, with the class of every pixel."""

import numpy as np

SIZE = 32


def pictures(count, random):
    """Return pictures `[N, SIZE, SIZE, 3] float32` and the class of every pixel, `[N, SIZE, SIZE]`."""
    images, masks = np.empty((count, SIZE, SIZE, 3), np.float32), np.zeros((count, SIZE, SIZE), np.int64)
    y, x = np.mgrid[:SIZE, :SIZE]
    for image, mask in zip(images, masks, strict=True):
        for label in (1, 2):
            row, column = random.integers(6, SIZE - 6, 2)
            size, down, right = random.integers(4, 8), abs(y - row), abs(x - column)
            mask[np.hypot(down, right) < size if label == 1 else np.maximum(down, right) < size] = label
        image[:] = np.eye(3)[mask] * 0.7 + random.uniform(0, 0.3, 3) + random.normal(0, 0.2, image.shape)
    return images, masks


def data():
    """Return the pictures to train and to test on."""
    random = np.random.default_rng(0)
    return {"train": pictures(240, random), "test": pictures(60, random), "classes": ["background", "disc", "square"]}
