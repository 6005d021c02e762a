"""Models, by the name that a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable

import keras
from keras import layers

from cluster.errors import UsageError, nearest


def two_conv_cnn(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return the two-conv CNN of TensorFlow's distributed-training tutorials.

    Source: https://www.tensorflow.org/tutorials/distribute/custom_training

    Args:
        image_shape: (height, width, channels).
        num_classes: classes to tell apart.

    Returns:
        A model from pixels `[B, H, W, C]` of 0 to 255, any numeric dtype, to logits `[B, num_classes] float32`.
    """
    return keras.Sequential(
        [
            keras.Input(image_shape, dtype="float32", name="image"),
            layers.Rescaling(1 / 255),  # inside the model: a served model takes raw pixels
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(num_classes, name="logits"),
        ],
        name="two_conv_cnn",
    )


MODELS: dict[str, Callable[[tuple[int, int, int], int], keras.Model]] = {"two_conv_cnn": two_conv_cnn}


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return the model called `name`.

    Raises:
        UsageError: there is none.
    """
    if name not in MODELS:
        raise UsageError(f"--model {name!r} is not a model{nearest(name, MODELS)}")
    return MODELS[name](image_shape, num_classes)
