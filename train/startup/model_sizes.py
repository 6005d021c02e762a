"""The memory that a run's model takes, estimated before the run starts."""

import math
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow import keras

from cluster.contract.compatibility import precision_of
from train.config import TrainConfig
from train.data import opening
from train.model import models, optimizers
from train.strategy import precision_policy

WITHOUT_ACTIVATION = ("InputLayer", "Flatten", "Reshape", "Dropout")
"""Layers whose outputs share the memory of their inputs, or take none without training."""


def measure_model(config: TrainConfig, strategy: str, data_dir: Path) -> dict[str, Any]:
    """Return the model's sizes: `parameters`, and bytes of its weights, their gradients and the optimizer's state.

    `activation_bytes` are those of one example: the outputs of all layers, which the backward needs, or None if they
    are unknown.
    """
    source = opening.open_source(config, data_dir)
    with precision_policy(precision_of(strategy, config.precision)):
        model = models.build_configured(config, source.feature_shape, source.num_outputs)
        optimizer = optimizers.build_optimizer(config)
        optimizer.build(model.trainable_variables)
    state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return {
        "parameters": sum(math.prod(weight.shape) for weight in model.weights),
        "weights_bytes": _sum_bytes(model.weights),
        "gradients_bytes": _sum_bytes(model.trainable_variables),
        "optimizer_bytes": _sum_bytes(state),
        "activation_bytes": _count_activation_bytes(model),
    }


def _sum_bytes(variables: Any) -> int:
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def _count_activation_bytes(model: Any) -> int | None:
    total = 0
    for layer in model.layers:
        if type(layer).__name__ in WITHOUT_ACTIVATION:
            continue
        if isinstance(layer, keras.Model):
            inner = _count_activation_bytes(layer)
            if inner is not None:
                total += inner
                continue
        try:
            outputs = tf.nest.flatten(layer.output)
            sizes = [math.prod(int(size) for size in output.shape[1:]) for output in outputs]
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
        total += sum(size * tf.as_dtype(layer.compute_dtype).size for size in sizes)
    return total
