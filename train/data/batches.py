"""What a batch is, and which batches the replicas of a task work on.

Shapes: B replica batch, K labels of an example where it has more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from cluster.system.errors import UsageError
from train.named import Named


class Batch(NamedTuple):
    """What one replica works on at one step; several features, or labels, are dictionaries of tensors."""

    features: Named
    """`[B, ...]` uint8, int32, int64 or float32."""
    labels: Named
    """`[B]` or `[B, K]`, int64 or float32."""
    weights: tf.Tensor
    """`[B] float32`: in training each example's weight, 1 where it has none; in evaluation 1, and 0 for padding."""


@dataclass(frozen=True)
class Replicas:
    """The replicas that one input pipeline feeds.

    Attributes:
        total: replicas of the whole cluster.
        first: number of the first one that is fed, from 0.
        count: how many are fed.
    """

    total: int = 1
    first: int = 0
    count: int = 1

    @classmethod
    def of(cls, context: tf.distribute.InputContext) -> Replicas:
        """Return those of one of a strategy's input pipelines."""
        count = context.num_replicas_in_sync // context.num_input_pipelines
        return cls(context.num_replicas_in_sync, context.input_pipeline_id * count, count)

    @property
    def numbers(self) -> range:
        """Their numbers among all replicas."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class BatchSlice:
    """The batches to train on that one input pipeline has: of each of its steps one for each of its replicas.

    Attributes:
        global_batch: examples of one update over all replicas; a multiple of their number.
        seed: of the order; the orders of two seeds are unrelated.
        first_step: optimizer updates done before.
        num_steps: optimizer updates to do; None: without end.
        replicas: those that are fed.

    Raises:
        UsageError: the replicas cannot share the global batch evenly.
    """

    global_batch: int
    seed: int
    first_step: int | tf.Tensor = 0
    num_steps: int | None = None
    replicas: Replicas = field(default_factory=Replicas)

    def __post_init__(self) -> None:
        """Check the global batch."""
        if self.global_batch % self.replicas.total:
            raise UsageError(
                f"global batch {self.global_batch}: expected a multiple of the {self.replicas.total} replicas"
            )

    @property
    def replica_batch(self) -> int:
        """Examples of one replica at one step."""
        return self.global_batch // self.replicas.total

    @property
    def num_batches(self) -> int:
        """How many batches these are; `tf.data.INFINITE_CARDINALITY` without end."""
        return tf.data.INFINITE_CARDINALITY if self.num_steps is None else self.num_steps * self.replicas.count


def eval_batches(num_examples: int, *, replica_batch: int, num_replicas: int) -> int:
    """Return how many global batches cover `num_examples`, the last one padded."""
    return -(-num_examples // (replica_batch * num_replicas))


def by_step(
    batch: Callable[[tf.Tensor, tf.Tensor], Batch],
    num_batches: int,
    replicas: Replicas,
    first_step: int | tf.Tensor = 0,
) -> tf.data.Dataset:
    """Return the batches that a function makes of step and replica: step by step one for each replica.

    Args:
        batch: the function.
        num_batches: of the dataset; `tf.data.INFINITE_CARDINALITY` without end.
        replicas: those that are fed.
        first_step: the first step.
    """
    endless = num_batches == tf.data.INFINITE_CARDINALITY
    positions = tf.data.Dataset.counter() if endless else tf.data.Dataset.range(num_batches)

    def at(position: tf.Tensor) -> Batch:
        return batch(first_step + position // replicas.count, replicas.first + position % replicas.count)

    batches = positions.map(at, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return own_share(batches.prefetch(tf.data.AUTOTUNE))


def own_share(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset that is one task's share already: TensorFlow must not share it out again."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
