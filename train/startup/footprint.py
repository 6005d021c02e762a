"""Memory of a run's model: parameters, optimizer state and activations, without training.

    python -m train.startup.footprint --config JSON --strategy NAME --data-dir DIR

It imports TensorFlow; `cluster/host/launch/footprint.py` runs it and stores the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from cluster.contract import user_code
from cluster.contract.compatibility import precision_of
from train.config import TrainConfig
from train.model import variables

WITHOUT_ACTIVATION = ("InputLayer", "Flatten", "Reshape", "Dropout")
"""Layers whose outputs share the memory of their inputs, or take none without training."""


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.startup.footprint", description="Sizes of a run's model.")
    parser.add_argument("--config", type=json.loads, required=True, help="the run's configuration as JSON")
    parser.add_argument("--strategy", required=True, help="a key of cluster.strategies.STRATEGIES")
    parser.add_argument("--data-dir", type=Path, required=True, help="prepared data")
    options = parser.parse_args(arguments)
    config = TrainConfig.from_json(options.config)
    variables.set_for_trial(config.onednn, legacy_keras=config.needs_tf_keras(options.strategy))
    return user_code.reply(lambda: measure(config, options.strategy, options.data_dir))


def measure(config: TrainConfig, strategy: str, data_dir: Path) -> dict[str, Any]:
    """Return the model's sizes.

    Returns:
        `parameters`; `weights_bytes`; `gradients_bytes` of the trainable weights; `optimizer_bytes` of its state;
        `activation_bytes` of one example: the outputs of all layers, which the backward needs, or None if they are
        unknown.

    Raises:
        UsageError: the model or its data is wrong.
    """
    from train.data import sources
    from train.model import models, optimizers
    from train.strategy import policy

    source = sources.describe(config, data_dir)
    with policy(precision_of(strategy, config.precision)):
        model = models.of(config, source.feature_shape, source.num_outputs)
        optimizer = optimizers.build(config)
        optimizer.build(model.trainable_variables)
    state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return {
        "parameters": sum(math.prod(weight.shape) for weight in model.weights),
        "weights_bytes": _bytes(model.weights),
        "gradients_bytes": _bytes(model.trainable_variables),
        "optimizer_bytes": _bytes(state),
        "activation_bytes": _activation_bytes(model),
    }


def _bytes(variables: Any) -> int:
    import tensorflow as tf

    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def _activation_bytes(model: Any) -> int | None:
    """Return the bytes of all layers' outputs for one example."""
    import tensorflow as tf

    total = 0
    for layer in model.layers:
        if type(layer).__name__ in WITHOUT_ACTIVATION:
            continue
        try:
            outputs = tf.nest.flatten(layer.output)
            sizes = [math.prod(int(size) for size in output.shape[1:]) for output in outputs]
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
        total += sum(size * tf.as_dtype(layer.compute_dtype).size for size in sizes)
    return total


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without TensorFlow's teardown, which can wait for the user's threads
