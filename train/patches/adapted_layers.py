"""Normalization computes with its adapted mean and variance as they are, also once a checkpoint is restored.

Defect: `finalize_state` makes constants of the two variables, which `tf.train.Checkpoint` does not renew, nor could it
in a step that was traced before.
Versions: Keras 3.15.1 and tf_keras 2.21.0.
Test: tests/unit/train/model/test_initial_weights.py::test_whole_numbers_and_adapted_layers_are_taken
Not applied: if `Normalization.call` reads the variables.
"""

from typing import Any

from tensorflow import keras  # of either version

keras_call = keras.layers.Normalization.call


def call(layer: Any, inputs: Any) -> Any:
    """Return the normalized inputs."""
    constants = layer.mean, layer.variance
    layer.finalize_state()  # leaves given numbers as they are
    try:
        return keras_call(layer, inputs)
    finally:
        layer.mean, layer.variance = constants  # not the tensors of a graph


REPLACED = [(keras.layers.Normalization, "call", call, {"fixed": r"adapt_mean|finalize_state"})]
