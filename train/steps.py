"""The inner loops: many optimizer steps, or a whole evaluation, inside one call of a `tf.function`.

Shapes: B replica batch, G global batch, N examples, H W C image, S steps of one loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from train.data import memory


@dataclass(frozen=True)
class LoopResult:
    """What some optimizer steps gave, over all replicas."""

    losses: np.ndarray
    """`[S] float32`: mean loss of each step's global batch, before the step's update."""
    accuracies: np.ndarray
    """`[S] float32`: share of each step's global batch that was classified right."""
    stop: bool
    """Whether any task was asked to stop. All tasks see the same answer, so all stop after the same step."""


@dataclass(frozen=True)
class Trainee:
    """What is trained, and on what."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    global_batch: int
    num_replicas: int
    seed: int

    def update(self, tensors: memory.Examples, step: tf.Tensor, replica: tf.Tensor) -> tf.Tensor:
        """Do this replica's part of one optimizer step.

        The loss is summed over the replica's examples and divided by the global batch, so that the sum over replicas
        is the global batch's mean (https://www.tensorflow.org/tutorials/distribute/custom_training#define_the_loss_function).

        Args:
            tensors: the training split.
            step: int64 scalar, optimizer steps done before this one.
            replica: int64 scalar, this replica's place in the global batch.

        Returns:
            `[2] float32`: this replica's share of the loss and of the accuracy.
        """
        images_BHWC, labels_B = memory.train_batch(
            tensors,
            step,
            replica,
            replica_batch=self.global_batch // self.num_replicas,
            num_replicas=self.num_replicas,
            seed=self.seed,
        )
        with tf.GradientTape() as tape:
            logits_BK = self.model(tf.cast(images_BHWC, tf.float32), training=True)
            losses_B = tf.nn.sparse_softmax_cross_entropy_with_logits(labels_B, logits_BK)
            loss = tf.nn.compute_average_loss(losses_B, global_batch_size=self.global_batch)
        variables = [variable.value for variable in self.model.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, variables), self.model.trainable_variables)
        right_B = tf.cast(tf.argmax(logits_BK, -1, labels_B.dtype) == labels_B, tf.float32)
        return tf.stack([loss, tf.reduce_sum(right_B) / self.global_batch])


def synchronous(
    strategy: tf.distribute.Strategy, trainee: Trainee, tensors: memory.Examples, steps_per_loop: int
) -> Callable[[int, int, bool], LoopResult]:
    """Return a function that does some synchronous steps: (steps done before, steps to do, stop?) -> result.

    It is traced once whatever the number of steps, and talks to the other tasks once a step (gradients) and once more
    at its end (results).
    """

    def start() -> tf.Tensor:
        return tf.zeros([steps_per_loop, 2])

    def one_step(results_S2: tf.Tensor, tensors: memory.Examples, first: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        result_2 = trainee.update(tensors, first + done, replica)
        return tf.tensor_scatter_nd_update(results_S2, [[done]], [result_2])

    def join(results_S2: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        return tf.concat([tf.reshape(results_S2, [-1]), [stop]], 0)

    @tf.function
    def loop(tensors: memory.Examples, first: tf.Tensor, count: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        results = strategy.run(start)
        for done in tf.range(count):
            results = strategy.run(one_step, args=(results, tensors, first, done))
        return strategy.reduce("SUM", strategy.run(join, args=(results, stop)), axis=None)

    def run(first: int, count: int, stop: bool) -> LoopResult:
        arguments = (tf.constant(first, tf.int64), tf.constant(count, tf.int64), tf.constant(float(stop)))
        flat = loop(tensors, *arguments).numpy()
        results_S2 = flat[:-1].reshape(-1, 2)[:count]
        return LoopResult(results_S2[:, 0], results_S2[:, 1], bool(flat[-1] > 0))

    return run


def evaluation(
    strategy: tf.distribute.Strategy, model: keras.Model, tensors: memory.Examples, *, batch: int
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the model on every example of a split exactly once, at any replica count.

    Args:
        strategy: whose replicas share the work; every task calls the function.
        model: what is evaluated.
        tensors: the split.
        batch: examples that one replica takes at once.
    """
    replicas = strategy.num_replicas_in_sync
    num_examples = int(tensors[0].shape[0])
    batches = memory.eval_batches(num_examples, replica_batch=batch, num_replicas=replicas)

    def evaluate(tensors: memory.Examples) -> tf.Tensor:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        totals_2 = tf.zeros([2])
        for at in tf.range(batches, dtype=tf.int64):
            images_BHWC, labels_B, weights_B = memory.eval_batch(
                tensors, at, replica, replica_batch=batch, num_replicas=replicas
            )
            logits_BK = model(tf.cast(images_BHWC, tf.float32), training=False)
            losses_B = tf.nn.sparse_softmax_cross_entropy_with_logits(labels_B, logits_BK)
            right_B = tf.cast(tf.argmax(logits_BK, -1, labels_B.dtype) == labels_B, tf.float32)
            totals_2 += tf.stack([tf.reduce_sum(losses_B * weights_B), tf.reduce_sum(right_B * weights_B)])
        return totals_2

    @tf.function
    def evaluate_all(tensors: memory.Examples) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(evaluate, args=(tensors,)), axis=None)

    def run() -> dict[str, float]:
        loss, right = (float(total) for total in evaluate_all(tensors).numpy())
        return {"eval_loss": loss / num_examples, "eval_accuracy": right / num_examples}

    return run
