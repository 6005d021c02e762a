"""`--loop fit`: Keras's `Model.fit`, with the same data order, checkpoints, evaluation and report as the custom loop.

Keras 3 provides it, repaired for several tasks by `train/patches/`. Under parameter servers tf_keras provides it,
because Keras 3 does not support them. The choice is made before TensorFlow is imported (`train/startup/preload.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow import keras

from train.context import TaskContext
from train.data.batches import Batch, BatchSlice, Replicas
from train.data.sources import joined
from train.loops import callbacks
from train.loops.callback_state import CallbackState
from train.loops.keras_fit.fit_step import MicroBatches, separate_steps
from train.loops.keras_fit.follower import Follower
from train.loops.train_step import as_input, full_precision
from train.model import masks
from train.model.export import is_legacy
from train.model.layer_state import variables_of
from train.model.objectives import PerExample
from train.patches import batch_normalization, central_storage, layer_aggregation
from train.telemetry.report import Report


class Training:
    """One generation's training by `Model.fit`, from the newest checkpoint to the end or to a stop."""

    def __init__(self, context: TaskContext) -> None:
        self._context = context
        model = context.model
        with context.strategy.scope():
            batch_normalization.synchronize_batch_normalization(model, context.strategy.num_replicas_in_sync)
            if not is_legacy() and context.strategy.num_replicas_in_sync > 1:
                for variable in variables_of(model):
                    layer_aggregation.aggregate(variable)  # as `LayerState` does in the custom loop
        state = CallbackState() if context.config.callbacks else None
        self._policy = context.new_policy()
        if context.config.micro_batches == 1:
            self._policy.install()
        optimizer = self._policy.optimizer
        self._checkpoint = context.new_checkpoint(self._policy, state)
        self._first = context.restore(self._checkpoint)
        self._report = Report(context, self._first, self._policy)
        if not is_legacy():
            central_storage.let_replicas_assign([*model.variables, *optimizer.variables])
        with context.strategy.scope():
            micro_batches = MicroBatches(context, self._policy) if context.config.micro_batches > 1 else None
            if not micro_batches and not context.asynchronous:  # there Keras logs whole epochs only
                separate_steps(model, optimizer)
            # XLA over collectives on CPU crashes the process.
            model.compile(optimizer, **_compiled(context), jit_compile=False)
            model.optimizer = optimizer  # without Keras's loss scaling, see `train/model/gradients.py`
        self._reset_metrics = micro_batches.reset if micro_batches else lambda: None
        self._hooks = callbacks.Hooks(context, state) if state else None
        if self._hooks:
            self._report.results, self._report.evaluated_at = self._hooks.results, self._hooks.evaluated_at

    def run(self) -> None:
        """Train to the end or to a stop, then save, evaluate and report."""
        context, total = self._context, self._context.total_steps
        follower = Follower(
            context, self._report, self._checkpoint, self._policy, self._first, self._hooks, self._reset_metrics
        )
        follower.set_model(context.model)  # Keras does so in `fit`, which a finished training does not call
        self._checkpoint.prepare()
        if self._hooks:
            self._hooks.begin(self._first, follower.newest)
            follower.ended = self._hooks.enough
        while follower.step < total and not follower.ended:
            count, times = self._next_epochs(follower.step)
            if follower.catches_up:  # until there is a checkpoint
                count, times = (1, 1) if context.asynchronous and not self._hooks else (count, times)
            context.model.fit(
                _data(context, follower.step),
                epochs=times,
                steps_per_epoch=count,
                callbacks=[follower],
                shuffle=False,  # the data is in its order already
                verbose=0,
            )
        self._end(follower)

    def _next_epochs(self, step: int) -> tuple[int, int]:
        """Return the steps of Keras's next epoch, and the number of such epochs in one call.

        Keras's epochs in one call have one length and ours do not, so each has a separate call, as has the rest of an
        epoch after a resume. Under parameter servers Keras calls back only at the end of an epoch: without the user's
        callbacks, which count in epochs, an epoch is as short as an inner loop.
        """
        context, config = self._context, self._context.config
        left = context.total_steps - step
        if not context.asynchronous or self._hooks:
            return min(context.epoch_end(step) - step, left), 1
        count = min(config.steps_per_loop, left)
        return count, left // count

    def _end(self, follower: Follower) -> None:
        stopped, hooks = follower.stopped, self._hooks
        if follower.saved_at != follower.step and (stopped or not hooks):
            follower.save()
        if not stopped and self._report.evaluated_at != follower.step:
            follower.evaluate()
        if hooks:
            changed = hooks.end(follower.step, self._report.results, stopped=stopped)
            if not stopped:
                if follower.agree_on(changed):
                    follower.evaluate()
                follower.save()  # callbacks may have changed weights at the end, such as to the best ones
        self._checkpoint.wait()
        self._report.end(follower.step, stopped=stopped)


def _compiled(context: TaskContext) -> dict[str, Any]:
    """Return the losses and scores for `compile`: one, or one for each of several outputs.

    Scores are unweighted, as in evaluation and in the custom loop. Of several heads only the first one's score is
    computed, as in the custom loop.
    """
    objective, classifies, shapes = context.objective, context.source.classifies, context.source.label_shape
    if not isinstance(classifies, Mapping):
        score = _Score(_Compared(objective.score, classifies, shapes), objective.score_name)
        return {"loss": _Loss(_Compared(objective.loss, classifies, shapes)), "metrics": [score]}
    first, first_head = next(iter(objective.heads.items()))
    # With several heads, Keras puts the head's name before that of a metric.
    score_name = first_head.score_name if len(classifies) > 1 else objective.score_name
    return {
        "loss": {
            name: _Loss(_Compared(head.loss, classifies[name], shapes[name])) for name, head in objective.heads.items()
        },
        "loss_weights": {name: head.weight for name, head in objective.heads.items()},
        "metrics": {first: [_Score(_Compared(first_head.score, classifies[first], shapes[first]), score_name)]},
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
        return self.function(tf.cast(labels, tf.int64) if self.classifies else labels, full_precision(outputs_BK))


class _Loss(keras.losses.Loss):
    """A loss of each example for Keras, which takes its mean over the global batch."""

    def __init__(self, function: _Compared) -> None:
        super().__init__(name="loss")
        self._function = function

    def __call__(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None) -> tf.Tensor:
        """Return the mean. Keras would apply the mask again, by each replica's number of positions."""
        self._mask = masks.of(y_pred)
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


def _data(context: TaskContext, first: int) -> Any:
    """Return the infinite training data from step `first`, in the form that `fit` takes under this strategy."""
    config, source = context.config, context.source

    def pair_or_triple(batch: Batch) -> tuple[tf.Tensor, ...]:
        features = as_input(context.model, batch.features)
        return (features, batch.labels, batch.weights) if source.weighted else (features, batch.labels)

    def task_dataset(pipeline: tf.distribute.InputContext) -> tf.data.Dataset:
        if context.asynchronous:
            return source.shuffled_batches(config.global_batch, config.seed).map(pair_or_triple)
        replicas = Replicas.of(pipeline)
        batches = source.train_dataset(BatchSlice(config.global_batch, config.seed, first, replicas=replicas))
        if not context.spec.kind.collective:
            batches = joined(batches, replicas.count)
        return batches.map(pair_or_triple)

    if is_legacy():
        return keras.utils.experimental.DatasetCreator(task_dataset)
    if context.spec.kind.collective:  # each task prepares its part of every batch
        return context.strategy.distribute_datasets_from_function(task_dataset)
    # Keras 3 divides global batches itself. The number of shards is that of the custom loop.
    replicas = context.strategy.num_replicas_in_sync if source.sharded else 1
    return task_dataset(tf.distribute.InputContext(num_replicas_in_sync=replicas))
