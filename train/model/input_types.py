"""The types of a model's inputs, one or several by name."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow import keras

from train.named import Named


def input_dtypes(model: keras.Model, features: Named) -> Named:
    """Return the types of a model's features: those of its `keras.Input`s if they are integers, otherwise `float32`."""
    inputs = list(getattr(model, "inputs", None) or ())
    if not isinstance(features, Mapping):
        return _dtype(inputs[0]) if inputs else "float32"
    by_name = {tensor.name.partition(":")[0]: tensor for tensor in inputs}
    structure = getattr(model, "_inputs_struct", None) or getattr(model, "_nested_inputs", None)  # of either Keras
    by_name |= structure if isinstance(structure, Mapping) else {}
    return {name: _dtype(by_name[name]) if name in by_name else "float32" for name in features}


def _dtype(tensor: Any) -> str:
    dtype = tf.as_dtype(tensor.dtype)
    return str(dtype.name) if dtype.is_integer or dtype.is_bool else "float32"
