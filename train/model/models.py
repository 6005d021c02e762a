"""Models, by the name that a configuration gives them."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any

from tensorflow import keras  # Keras 3, or tf_keras where `--loop fit` needs that

from cluster.errors import UsageError, nearest
from train.config import TrainConfig
from train.model.resnet import resnet20, resnet50
from train.model.transformer import transformer_lm
from train.settings import references


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


MODELS: dict[str, Callable[..., Any]] = {
    "two_conv_cnn": two_conv_cnn,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "transformer_lm": transformer_lm,
}


def of(config: TrainConfig, feature_shape: tuple[int, ...], num_outputs: int) -> keras.Model:
    """Return the model that a configuration describes; for the rest see `build`."""
    size = config.transformer
    sizes = {"layers": size.layers, "width": size.width, "heads": size.heads}
    model = build(config.model, feature_shape, num_outputs, **(sizes if config.model == "transformer_lm" else {}))
    if config.loop == "custom" and type(model).train_step is not keras.Model.train_step:
        raise UsageError(
            f"--model {config.model!r}: {type(model).__name__} has a train_step of its own, which --loop custom would "
            "not call; use --loop fit"
        )
    freeze(model, config.freeze)
    return model


def freeze(model: keras.Model, names: str) -> None:
    """Exclude layers from training.

    Args:
        model: built.
        names: of the layers, or beginnings of names that end in `*`, separated by commas.

    Raises:
        UsageError: there is no such layer, or none is left to train.
    """
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False)}  # also those inside of others
    for pattern in filter(None, (part.strip() for part in names.split(","))):
        if not (matching := fnmatch.filter(layers, pattern)):
            raise UsageError(f"--freeze {pattern!r}{nearest(pattern, list(layers))}")
        for name in matching:
            layers[name].trainable = False
    if names and not model.trainable_variables:
        raise UsageError(f"--freeze {names!r}: no layer is left to train; leave some out")


def build(name: str, feature_shape: tuple[int, ...], num_outputs: int, **options: Any) -> keras.Model:
    """Return the model called `name`: a key of `MODELS`, or `package.module:function`.

    Args:
        name: what the configuration says.
        feature_shape: one example's shape.
        num_outputs: classes, or values to predict.
        options: of a built-in model.

    Raises:
        UsageError: there is no such function, or it does not return a model of the Keras in use that gives
            `[B, num_outputs]`, or `[B, T, num_outputs]` for T tokens.
    """
    function = MODELS[name] if name in MODELS else references.load("--model", name)
    model = references.call("--model", name, functools.partial(function, **options), feature_shape, num_outputs)
    if not isinstance(model, keras.Model):
        expected = f"a {keras.Model.__module__.partition('.')[0]} model"
        raise UsageError(
            f"--model {name!r} returned {type(model).__module__}.{type(model).__name__}, expected {expected}; "
            "use `from tensorflow import keras`, which is the Keras that the chosen loop needs"
        )
    # Called, not `build`: that leaves a model that is a class of the user's own without its layers' variables.
    outputs = model(keras.Input(feature_shape, dtype=input_dtype(model)))
    shape = getattr(outputs, "shape", None)
    positions = feature_shape if input_dtype(model) == "int32" else ()
    if shape is None or tuple(shape) not in ((None, num_outputs), (None, *positions, num_outputs)):
        given = type(outputs).__name__ if shape is None else tuple(shape)
        raise UsageError(f"--model {name!r} gives {given}, expected (None, {num_outputs}): an output a class or value")
    return model


def input_dtype(model: keras.Model) -> str:
    """Return the type of a model's features: `int32` where it takes whole numbers, such as tokens, or `float32`."""
    inputs = getattr(model, "inputs", None)
    return "int32" if inputs and "int" in str(inputs[0].dtype) else "float32"
