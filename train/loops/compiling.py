"""Compiles a model with the run's objective, for Keras's `fit` and for callbacks that evaluate or copy the model.

Shapes: B replica batch, K outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow import keras

from train import named
from train.context import TaskContext
from train.loops.train_step import cast_outputs
from train.model import masks
from train.model.objectives import PerExample
from train.named import Named


def compile_model(context: TaskContext, optimizer: Any, compile_with: Callable[..., None]) -> None:
    """Compile the model of a run by a `compile` of Keras. Call inside the strategy's scope."""
    model = context.model
    # XLA over collectives on CPU crashes the process.
    compile_with(optimizer, **_arguments(context), jit_compile=False)
    model.optimizer = optimizer  # without Keras's loss scaling, see `train/model/gradients.py`
    # Neither `clone_model` nor `load_model` could restore the functions among the arguments.
    model.get_compile_config = dict


def _arguments(context: TaskContext) -> dict[str, Any]:
    """Return the losses and metrics for `compile`: one, or one for each of several outputs.

    As in the custom loop, scores are unweighted, and of several heads only the first one's score is computed.
    """
    objective, classifies, shapes = context.objective, context.source.classifies, context.source.label_shape
    if isinstance(classifies, Mapping) and not objective.heads:
        return {}  # one loss of all outputs, which Keras has no name for
    heads: Named = objective.heads or objective
    losses = named.each(lambda head, *labels: _Loss(_compared(head.loss, *labels)), heads, classifies, shapes)
    if not objective.heads:
        score = _Score(_compared(objective.score, classifies, shapes), objective.score_name)
        return {"loss": losses, "metrics": [score]}
    name, first = next(iter(objective.heads.items()))
    # With several heads, Keras prefixes a metric's name with the head's.
    score_name = first.score_name if len(classifies) > 1 else objective.score_name
    return {
        "loss": losses,
        "loss_weights": named.each(lambda head: head.weight, heads),
        "metrics": {name: [_Score(_compared(first.score, classifies[name], shapes[name]), score_name)]},
    }


def _compared(function: PerExample, classifies: bool, label_shape: tuple[int, ...]) -> PerExample:
    """Return a function of labels, which Keras may have changed to the rank and type of the outputs, and outputs."""

    def compare(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
        labels = tf.reshape(labels, [-1, *label_shape])
        return function(tf.cast(labels, tf.int64) if classifies else labels, cast_outputs(outputs_BK))

    return compare


class _Loss(keras.losses.Loss):
    def __init__(self, function: PerExample) -> None:
        super().__init__(name="loss")
        self._function = function

    def __call__(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """Return the mean. Hide the mask, which Keras would apply again, by each replica's number of positions."""
        mask = self._mask = masks.mask_of(y_pred)
        y_pred._keras_mask = None
        try:
            return super().__call__(y_true, y_pred, sample_weight)
        finally:
            y_pred._keras_mask = mask  # the other replicas, which call this in between, have set `self._mask`

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        if self._mask is not None:
            y_pred._keras_mask = self._mask
        return self._function(y_true, y_pred)


class _Score(keras.metrics.Mean):
    def __init__(self, function: PerExample, name: str) -> None:
        super().__init__(name)
        self._function = function

    def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, **_weights: Any) -> Any:
        return super().update_state(self._function(y_true, y_pred))
