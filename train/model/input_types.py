"""The types of a model's inputs, one or several by name."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.named import Named

EXACT = {"float64": 2**24, "float32": 2**24, "bfloat16": 2**8, "float16": 2**11}
"""The largest whole number up to which a model's inputs are exact, by the type in which it computes."""
ROUNDED = "whole numbers are rounded in the type of the model's inputs,"
INSTEAD = "declare inputs = keras.Input(shape, dtype='int64') and return keras.Model(inputs, model(inputs))"


def explain(error: Exception) -> UsageError | None:
    """Translate TensorFlow's error about features that the model would round; None for other errors."""
    _, rounded, rest = str(error).partition(ROUNDED)
    if not rounded:
        return None
    return UsageError(f"--model takes features as {rest.partition(';')[0].strip()}, which rounds their ids; {INSTEAD}")


def input_dtypes(model: keras.Model, features: Named) -> Named:
    """Return the types of a model's features: those of its `keras.Input`s if they are integers, otherwise `float32`."""
    inputs = list(getattr(model, "inputs", None) or ())
    if not isinstance(features, Mapping):
        return _dtype(inputs[0]) if inputs else "float32"
    by_name = {tensor.name.partition(":")[0]: tensor for tensor in inputs}
    structures = getattr(model, "_inputs_struct", None), getattr(model, "_nested_inputs", None)  # of either Keras
    by_name |= next((structure for structure in structures if isinstance(structure, Mapping)), {})
    return {name: _dtype(by_name[name]) if name in by_name else "float32" for name in features}


def _dtype(tensor: Any) -> str:
    dtype = tf.as_dtype(tensor.dtype)
    return str(dtype.name) if dtype.is_integer or dtype.is_bool else "float32"
