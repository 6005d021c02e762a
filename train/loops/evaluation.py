"""Evaluation of a model on a whole test split, as one call of a `tf.function`.

Shapes: B replica batch, K outputs, N batches of all replicas, M reported means.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from train.data.batches import Batch, eval_batches
from train.data.feeds import eval_feed
from train.data.sources import Source
from train.loops.train_step import cast_features, cast_outputs, repeat
from train.model import masks
from train.model.objectives import Objective
from train.named import Named
from train.patches import placed_seeds
from train.telemetry.positions import Positions


def new_evaluation(
    strategy: tf.distribute.Strategy | None,
    model: keras.Model,
    objective: Objective,
    source: Source,
    largest_batch: int,
    positions: Positions | None = None,
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the model on every test example exactly once, at any replica count.

    All tasks call it and share the work on the replicas of `strategy`, in batches of at most `largest_batch` examples;
    without a strategy, this task does all the work.
    """
    replicas, batch = strategy.num_replicas_in_sync if strategy else 1, min(largest_batch, source.test_examples)
    batches = eval_batches(source.test_examples, replica_batch=batch, num_replicas=replicas)
    feed = eval_feed(strategy, source, batch)

    def add(totals_N2M: tf.Tensor, batch_input: Any, at: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group if strategy else 0
        replica = tf.cast(replica, tf.int64)
        examples, place = feed.batch(batch_input, at, replica), at * replicas + replica
        # A layer that draws at inference, such as one that samples, draws the same in each evaluation.
        with placed_seeds.random_place(tf.zeros_like(place), place):
            outputs_BK = cast_outputs(model(cast_features(model, examples.features), training=False))
        return add_totals(totals_N2M, place, objective, examples, outputs_BK)

    def evaluate(at: tf.Tensor, totals: Any) -> Any:
        if positions:
            positions.set_batch(at, after=totals)
        arguments = (totals, feed.next(), at)
        return strategy.run(add, args=arguments) if strategy else add(*arguments)

    @tf.function(autograph=False)
    def evaluate_all() -> tf.Tensor:
        shape = [batches * replicas, 2, len(objective.reported)]
        start = strategy.run(lambda: tf.zeros(shape)) if strategy else tf.zeros(shape)
        totals = repeat(tf.constant(batches, tf.int64), evaluate, start)
        return strategy.reduce("SUM", totals, axis=None) if strategy else totals

    def measure() -> dict[str, float]:
        totals_N2M = evaluate_all().numpy()
        return summarize(totals_N2M, objective, sum(float(term) for term in _regularization_losses(model)))

    return measure


def _regularization_losses(model: keras.Model) -> list[tf.Tensor]:
    """Return the losses of the regularizers of weights, without those that layers add in `call`."""
    if hasattr(model, "_get_regularization_losses"):
        return model._get_regularization_losses()
    # The `losses` of tf_keras also have the tensors of the calls in graphs, which have no value here.
    losses = [loss() for layer in model._flatten_layers() for loss in layer._callable_losses]
    return [loss for loss in losses if loss is not None]


def add_totals(
    totals_N2M: tf.Tensor, place: tf.Tensor, objective: Objective, examples: Batch, outputs_BK: Named
) -> tf.Tensor:
    """Write a batch's weighted sums of reported values, and of examples or unmasked positions, to row `place`."""
    totals_M2 = []
    for function in objective.reported.values():
        with masks.sum_only() as found:
            values_B = function(examples.labels, outputs_BK)
        counts_B = masks.count_by_example(found[0]) if found else tf.ones_like(examples.weights)
        totals_M2.append([tf.reduce_sum(values_B * examples.weights), tf.reduce_sum(counts_B * examples.weights)])
    return tf.tensor_scatter_nd_update(totals_N2M, [[place]], [tf.transpose(totals_M2)])


def summarize(totals_N2M: np.ndarray, objective: Objective, penalty: float) -> dict[str, float]:
    """Return the results of an evaluation from the totals of each batch, in the order of `reported`.

    The batches, of which each replica fills in some, are the same at any number of replicas, and so are the results.
    `penalty` is the regularization, which the loss includes, as in training and in Keras's `val_loss`.
    """
    sums, counts = totals_N2M.astype(np.float64).cumsum(0)[-1].tolist()
    parts = zip(objective.reported, sums, counts, strict=True)
    means = {f"eval_{name}": total / count if count else 0.0 for name, total, count in parts}
    if objective.heads:  # heads may have different masks
        means["eval_loss"] = sum(head.weight * means[f"eval_{name}_loss"] for name, head in objective.heads.items())
    return means | {"eval_loss": means["eval_loss"] + penalty}
