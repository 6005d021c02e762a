"""Measures how long each block of a model takes for the forward and backward of one micro-batch on this machine.

Equal blocks, such as the layers of a Transformer, are measured once.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from train.pipeline.blocks import ModelBlock

RUNS = 5
"""Runs whose median counts, after one that compiles."""


def block_seconds(blocks: Sequence[ModelBlock], micro_batch: int) -> list[float]:
    """Return the seconds of each block for `micro_batch` examples."""
    known: dict[str, float] = {}
    for block in blocks:
        if (kind := _kind(block)) not in known:
            known[kind] = _seconds(block, micro_batch)
    return [known[_kind(block)] for block in blocks]


def _seconds(block: ModelBlock, micro_batch: int) -> float:
    model = keras.Model(block.inputs, block.outputs)
    valueless = [variable for variable in model.variables if variable._value is None]
    for variable in valueless:
        variable._deferred_initialize()
    variables = [variable.value for variable in model.trainable_variables]
    values = _values([micro_batch, *block.inputs.shape[1:]], block.inputs.dtype)

    @tf.function(autograph=False)
    def compute(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([values] if values.dtype.is_floating else [])
            outputs = model(values, training=True)
        sources = [values, *variables] if values.dtype.is_floating else variables
        return [outputs, *(gradient for gradient in tape.gradient(outputs, sources) if gradient is not None)]

    compute(values)
    samples = []
    for _ in range(RUNS):
        began = time.perf_counter()
        compute(values)
        samples.append(time.perf_counter() - began)
    for variable in valueless:  # so that the next block fits into memory
        release(variable.value)
    return statistics.median(samples)


def release(variable: tf.Variable) -> None:
    """Free the memory of a variable, which must not be used afterwards."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))


def _values(shape: Sequence[int], dtype: str) -> tf.Tensor:
    if not tf.as_dtype(dtype).is_floating:
        return tf.zeros(shape, dtype)
    return tf.cast(tf.random.stateless_normal(shape, seed=(0, 0)), dtype)


def _kind(block: ModelBlock) -> str:
    """Return a key that is equal for blocks that take the same time: layers without their names, and the shape."""
    try:
        layers = [json.dumps(layer.get_config(), sort_keys=True, default=str) for layer in block.layers]
    except NotImplementedError:  # a user's layer without a configuration
        return " ".join(block.names)
    described = [type(layer).__name__ + text for layer, text in zip(block.layers, layers, strict=True)]
    return re.sub(r'"name": "[^"]*"', "", " ".join(described)) + str(block.inputs.shape)


def conditions(config: Any) -> dict[str, str]:
    """Return the settings on which the times of a model's blocks depend."""
    names = ("model", "freeze", "transformer", "global_batch", "micro_batches", "precision", "threads", "onednn")
    values = {name: getattr(config, name) for name in names}
    return {name: str(value) for name, value in values.items()}
