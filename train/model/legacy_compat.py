"""What tf_keras needs for its random layers to draw by the step and the replica, as `keras_compat.py` has Keras 3 do.

By themselves they draw from states of TensorFlow's that no checkpoint holds, so that a training which is resumed would
drop other units than one that was not disturbed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from train.model import keras_compat


def install(model: Any, seed: int) -> None:
    """Draw random numbers of a tf_keras model's layers by their place, wherever there is one.

    Args:
        model: built.
        seed: of the training. A layer's own follows from it, its place in the model and the seed it was made with.
    """
    for number, layer in enumerate(model._flatten_layers()):  # also those inside of other layers
        generator = getattr(layer, "_random_generator", None)
        if generator is None:
            continue
        own = int.from_bytes(hashlib.sha256(f"{seed} {number} {generator._seed}".encode()).digest()[:4], "big")
        for name, stateless in _STATELESS.items():
            setattr(generator, name, _placed(generator, getattr(generator, name), stateless, own))


def _placed(generator: Any, original: Callable[..., Any], stateless: Callable[..., Any], own: int) -> Any:
    def draw(*args: Any, **options: Any) -> Any:
        if (place := keras_compat.place()) is None:
            return original(*args, **options)
        return stateless(keras_compat.draw_seed(place, generator, tf.constant(own, tf.int64)), *args, **options)

    return draw


def _dropout(seed: tf.Tensor, inputs: Any, rate: Any, noise_shape: Any = None) -> tf.Tensor:
    return tf.nn.experimental.stateless_dropout(inputs, rate, seed, noise_shape=noise_shape, rng_alg="philox")


def _normal(seed: tf.Tensor, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, **_: Any) -> Any:
    dtype = dtype or tf.keras.backend.floatx()
    return tf.random.stateless_normal(shape, seed, mean=mean, stddev=stddev, dtype=dtype, alg="philox")


def _truncated(seed: tf.Tensor, shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, **_: Any) -> Any:
    dtype = dtype or tf.keras.backend.floatx()
    return tf.random.stateless_truncated_normal(shape, seed, mean=mean, stddev=stddev, dtype=dtype, alg="philox")


def _uniform(
    seed: tf.Tensor, shape: Any, minval: float = 0.0, maxval: float | None = None, dtype: Any = None, **_: Any
) -> Any:
    dtype = dtype or tf.keras.backend.floatx()
    maxval = 1.0 if maxval is None and tf.as_dtype(dtype).is_floating else maxval
    return tf.random.stateless_uniform(shape, seed, minval=minval, maxval=maxval, dtype=dtype, alg="philox")


_STATELESS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "random_normal": _normal,
    "truncated_normal": _truncated,
    "random_uniform": _uniform,
    "make_seed_for_stateless_op": lambda seed: tf.bitcast(seed, tf.int32),
}
"""What replaces the methods of tf_keras's `RandomGenerator`."""
