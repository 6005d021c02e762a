"""Models, by the name that a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow import keras  # Keras 3, or tf_keras where `--loop fit` needs that

from cluster.errors import UsageError
from train import references
from train.model.resnet import resnet50


def two_conv_cnn(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return the two-conv CNN of TensorFlow's distributed-training tutorials.

    Source: https://www.tensorflow.org/tutorials/distribute/custom_training

    Args:
        image_shape: (height, width, channels).
        num_classes: number of classes.

    Returns:
        A model from pixels `[B, H, W, C]` of 0 to 255, any numeric dtype, to logits `[B, num_classes] float32`.
    """
    layers = keras.layers
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
            layers.Dense(num_classes, dtype="float32", name="logits"),  # in full precision under any policy
        ],
        name="two_conv_cnn",
    )


MODELS: dict[str, Callable[..., Any]] = {"two_conv_cnn": two_conv_cnn, "resnet50": resnet50}


def build(name: str, feature_shape: tuple[int, ...], num_outputs: int) -> keras.Model:
    """Return the model called `name`: a key of `MODELS`, or `package.module:function`.

    Args:
        name: what the configuration says.
        feature_shape: one example's shape.
        num_outputs: classes, or values to predict.

    Raises:
        UsageError: there is no such function, or it does not return a model of the Keras in use that gives
            `[B, num_outputs]`.
    """
    function = MODELS[name] if name in MODELS else references.load("--model", name)
    model = references.call("--model", name, function, feature_shape, num_outputs)
    if not isinstance(model, keras.Model):
        expected = f"a {keras.Model.__module__.partition('.')[0]} model"
        raise UsageError(
            f"--model {name!r} returned {type(model).__module__}.{type(model).__name__}, expected {expected}; "
            "use `from tensorflow import keras`, which is the Keras that the chosen loop needs"
        )
    # Called, not `build`: that leaves a model that is a class of the user's own without its layers' variables.
    outputs = model(keras.Input(feature_shape))
    shape = getattr(outputs, "shape", None)
    if shape is None or tuple(shape) != (None, num_outputs):
        given = type(outputs).__name__ if shape is None else tuple(shape)
        raise UsageError(f"--model {name!r} gives {given}, expected (None, {num_outputs}): an output a class or value")
    return model
