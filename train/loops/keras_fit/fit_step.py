"""The `train_step` of `--loop fit`: that of Keras, or that of the custom loop with micro-batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.context import TaskContext
from train.data.batches import Batch
from train.loops.train_step import Computed, TrainStep, part_of
from train.model.gradients import GradientPolicy
from train.patches import placed_seeds


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
        """Call inside the strategy's scope, with a model that passes `check`."""
        config, model = context.config, context.model
        replicas = context.strategy.num_replicas_in_sync
        replicas = 1 if context.asynchronous else replicas
        alone = replicas == 1 and not context.asynchronous
        parts = model, policy, context.objective, config.global_batch
        # Loops of several replicas that read the same variables of one device wait for each other indefinitely.
        central = isinstance(context.strategy, tf.distribute.experimental.CentralStorageStrategy)
        self._step = TrainStep(*parts, replicas, config.micro_batches, unrolled=central, as_function=alone)
        self._means = [keras.metrics.Mean(name) for name in ("loss", context.objective.score_name)]
        self._separate = not context.asynchronous  # see `separate_steps`
        model.train_step = self._train

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
                return part_of(batch, micro_batch, self._step.micro_batches)

            return self._step.compute(batch_of, step, replica, micro_batch)

        shares_12 = self._step.update(self._step.accumulated(compute, lambda function, args: function(*args), ()))
        if self._separate:
            self.reset()
        for mean, share in zip(self._means, tf.unstack(shares_12[0]), strict=True):
            mean.update_state(share * self._step.num_replicas, sample_weight=examples)
        return {mean.name: mean.result() for mean in self._means}


def _replica() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)


def check(model: keras.Model, replicas: int, micro_batches: int) -> None:
    """Check that a model can be trained in micro-batches by this loop.

    Raises:
        UsageError: it cannot.
    """
    option = f"--micro-batches {micro_batches} with --loop fit"
    if type(model).train_step is not keras.Model.train_step:
        raise UsageError(
            f"{option}: {type(model).__name__} overrides train_step, which takes whole batches; leave --micro-batches "
            "out"
        )
    if replicas > 1 and any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()):
        raise UsageError(f"{option}: BatchNormalization over {replicas} replicas needs --loop custom")
