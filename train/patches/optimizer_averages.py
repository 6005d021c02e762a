"""An optimizer averages only the weights that an update changes.

Defect: with `use_ema` Keras averages all weights that the optimizer was built for, including those of other stages.
Versions: Keras 3.15.1.
Test: tests/unit/train/pipeline/test_stage_variables.py
Not applied: unless `average_changed_weights` is called, which only stages of a pipeline need.
"""

from types import SimpleNamespace

import keras
import tensorflow as tf


def average_changed_weights(optimizer: keras.optimizers.Optimizer) -> None:
    """Restrict an optimizer's moving averages to the weights of each update."""
    apply, changed = optimizer._backend_apply_gradients, list[keras.Variable]()

    def apply_gradients(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        changed[:] = variables
        apply(gradients, variables)

    def average(_all: list[keras.Variable]) -> None:
        averages = optimizer._model_variables_moving_average
        of_changed = SimpleNamespace(
            use_ema=True,
            iterations=optimizer.iterations,
            ema_momentum=optimizer.ema_momentum,
            _model_variables_moving_average=[averages[optimizer._get_variable_index(weight)] for weight in changed],
        )
        type(optimizer)._update_model_variables_moving_average(of_changed, changed)

    optimizer._backend_apply_gradients = apply_gradients
    optimizer._update_model_variables_moving_average = average
