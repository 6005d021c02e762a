"""What Keras's `fit` trains with: the losses and scores of the custom loop, and its steps.

Shapes: B replica batch, K outputs.
"""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train import named
from train.context import TaskContext
from train.data.batches import Batch
from train.loops.train_step import Computed, cast_outputs, cut_part
from train.model import masks, models
from train.model.gradients import GradientPolicy
from train.model.objectives import PerExample
from train.named import Named
from train.patches import placed_seeds


def compile_arguments(context: TaskContext) -> dict[str, Any]:
    """Return the losses and scores for `compile`: one, or one for each of several outputs.

    Scores are unweighted, as in evaluation and in the custom loop. Of several heads only the first one's score is
    computed, as in the custom loop.
    """
    objective, classifies, shapes = context.objective, context.source.classifies, context.source.label_shape
    heads: Named = objective.heads or objective
    losses = named.each(lambda head, *labels: _Loss(_Compared(head.loss, *labels)), heads, classifies, shapes)
    if not objective.heads:
        score = _Score(_Compared(objective.score, classifies, shapes), objective.score_name)
        return {"loss": losses, "metrics": [score]}
    name, first = next(iter(objective.heads.items()))
    # With several heads, Keras puts the head's name before that of a metric.
    score_name = first.score_name if len(classifies) > 1 else objective.score_name
    return {
        "loss": losses,
        "loss_weights": named.each(lambda head: head.weight, heads),
        "metrics": {name: [_Score(_Compared(first.score, classifies[name], shapes[name]), score_name)]},
    }


@dataclass(frozen=True)
class _Compared:
    """A function of labels and outputs, as Keras passes them."""

    function: PerExample
    classifies: bool
    label_shape: tuple[int, ...]

    def __call__(self, labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
        """Return the values, `[B] float32`. Keras may have changed the labels to the rank and type of the outputs."""
        labels = tf.reshape(labels, [-1, *self.label_shape])
        return self.function(tf.cast(labels, tf.int64) if self.classifies else labels, cast_outputs(outputs_BK))


class _Loss(keras.losses.Loss):
    """A loss of each example for Keras, which takes its mean over the global batch."""

    def __init__(self, function: _Compared) -> None:
        super().__init__(name="loss")
        self._function = function

    def __call__(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """Return the mean. Keras would apply the mask again, by each replica's number of positions."""
        self._mask = masks.mask_of(y_pred)
        return super().__call__(y_true, tf.identity(y_pred), sample_weight)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        if self._mask is not None:
            y_pred._keras_mask = self._mask
        return self._function(y_true, y_pred)


class _Score(keras.metrics.Mean):
    """The mean of a score of each example."""

    def __init__(self, function: _Compared, name: str) -> None:
        super().__init__(name)
        self._function = function

    def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, **_weights: Any) -> Any:
        return super().update_state(self._function(y_true, y_pred))


def separate_steps(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Make Keras log the loss and score of each step, as the custom loop does, not means since the epoch began.

    Random numbers follow from the step and the replica, see `train/patches/placed_seeds.py`.
    """
    train_step = model.train_step

    def separate(data: Any) -> Any:
        for metric in model.metrics:
            metric.reset_state()
        with placed_seeds.random_place(tf.cast(optimizer.iterations, tf.int64), _replica()):
            return train_step(data)

    model.train_step = separate


class MicroBatches:
    """Replaces a model's `train_step` by the one of the custom loop, and keeps its metrics."""

    def __init__(self, context: TaskContext, policy: GradientPolicy) -> None:
        """Call inside the strategy's scope, with a model that passes `check_micro_batches`."""
        # Loops of several replicas that read the same variables of one device wait for each other indefinitely.
        central = isinstance(context.strategy, tf.distribute.experimental.CentralStorageStrategy)
        self._step = context.new_train_step(policy, unrolled=central)
        self._means = [keras.metrics.Mean(name) for name in ("loss", context.objective.score_name)]
        self._separate = not context.asynchronous  # see `separate_steps`
        context.model.train_step = self._train

    def reset(self) -> None:
        """Reset the metrics."""
        for mean in self._means:
            mean.reset_state()

    def _train(self, data: Any) -> dict[str, tf.Tensor]:
        step, replica = tf.cast(self._step.policy.optimizer.iterations, tf.int64), _replica()
        examples = self._step.global_batch // self._step.num_replicas
        data = tf.nest.map_structure(lambda tensor: tf.ensure_shape(tensor, [examples, *tensor.shape[1:]]), data)
        features, labels, *weights = data
        batch = Batch(features, labels, weights[0] if weights else tf.ones([examples]))

        def compute(micro_batch: tf.Tensor) -> Computed:
            def batch_of(_part: tf.Tensor) -> Batch:
                return cut_part(batch, micro_batch, self._step.micro_batches)

            return self._step.compute(batch_of, step, replica, micro_batch)

        shares_12 = self._step.update(self._step.accumulated(compute, lambda function, args: function(*args), ()))
        if self._separate:
            self.reset()
        for mean, share in zip(self._means, tf.unstack(shares_12[0]), strict=True):
            mean.update_state(share * self._step.num_replicas, sample_weight=examples)
        return {mean.name: mean.result() for mean in self._means}


def _replica() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)


def check_micro_batches(model: keras.Model, replicas: int, micro_batches: int) -> None:
    """Check that a model can be trained in micro-batches by this loop."""
    option = f"--micro-batches {micro_batches} with --loop fit"
    if method := models.find_override(model):
        raise UsageError(
            f"{option}: {type(model).__name__} overrides {method}, which takes whole batches; leave --micro-batches out"
        )
    if replicas > 1 and any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()):
        raise UsageError(f"{option}: BatchNormalization over {replicas} replicas needs --loop custom")


def check_optimizers(model: keras.Model, replicas: int) -> None:
    """Check that no optimizer of a model itself creates its variables in a `train_step` of several replicas."""
    parts = {name: part for name, part in vars(model).items() if isinstance(part, keras.optimizers.Optimizer)}
    if replicas > 1 and (unbuilt := [name for name, optimizer in parts.items() if not optimizer.built]):
        raise UsageError(
            f"--loop fit on {replicas} replicas: {type(model).__name__}.{unbuilt[0]} has no variables yet; call its "
            "build(variables) where the model is made"
        )
