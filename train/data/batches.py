"""Batches, and the assignment of batches to the replicas of a task.

Shapes: B replica batch, G global batch, L replicas of a task, K labels of an example where it has more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from cluster.system.errors import UsageError
from train.data.dataset_record import Split
from train.named import Named

INFINITE = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
"""Declares a dataset as infinite. Only then does a distributed dataset keep the shapes of its batches."""

EVAL_CACHE_BYTES = 1 << 30
"""Maximum size of a task's test examples for these to be cached in memory."""


class Batch(NamedTuple):
    """A replica's examples for one step; several features or labels are dictionaries of tensors."""

    features: Named
    """`[B, ...]` uint8, int32, int64 or float32."""
    labels: Named
    """`[B]` or `[B, K]`, int64 or float32."""
    weights: tf.Tensor
    """`[B] float32`: in training each example's weight, 1 by default; in evaluation 1, and 0 for padding."""


@dataclass(frozen=True)
class Replicas:
    """The replicas that one input pipeline feeds: `count` of the cluster's `total`, from number `first` (0-based)."""

    total: int = 1
    first: int = 0
    count: int = 1

    @classmethod
    def from_context(cls, context: tf.distribute.InputContext) -> Replicas:
        """Return the replicas of one of a strategy's input pipelines."""
        count = context.num_replicas_in_sync // context.num_input_pipelines
        return cls(context.num_replicas_in_sync, context.input_pipeline_id * count, count)

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class VirtualShards:
    """The virtual shards of every global batch, assigned to the replicas in order and as evenly as possible.

    A replica computes its shards sequentially. Without `--bitwise-elastic` it has one shard, its batch.
    """

    total: int
    """Shards of a global batch."""
    replicas: int
    """Number of replicas, at most `total`."""

    @property
    def most(self) -> int:
        """Largest number of shards of a replica."""
        return -(-self.total // self.replicas)

    def first(self, replica: int) -> int:
        """Return the first shard of a replica; for `replicas`, the number of all shards."""
        even, more = divmod(self.total, self.replicas)
        return replica * even + min(replica, more)

    def list_shards(self, replica: tf.Tensor) -> tf.Tensor:
        """Return the shards of a replica, `[n] int64`; `replica` is an int64 scalar tensor."""
        return tf.range(self._firsts[replica], self._firsts[replica + 1])

    def place(self, shard: tf.Tensor) -> tf.Tensor:
        """Return a shard's index among those of its replica, int64 scalar."""
        return shard - tf.reduce_max(tf.where(self._firsts <= shard, self._firsts, 0))

    @property
    def _firsts(self) -> tf.Tensor:
        return tf.constant([self.first(replica) for replica in range(self.replicas + 1)], tf.int64)


@dataclass(frozen=True)
class BatchSlice:
    """The infinite training batches of one input pipeline: for each step, one batch for each of its replicas."""

    global_batch: int
    seed: int
    first_step: int | tf.Tensor = 0
    replicas: Replicas = field(default_factory=Replicas)

    def __post_init__(self) -> None:
        if self.global_batch % self.replicas.total:
            raise UsageError(
                f"global batch {self.global_batch}: expected a multiple of the {self.replicas.total} replicas"
            )

    @property
    def replica_batch(self) -> int:
        return self.global_batch // self.replicas.total


def eval_batches(num_examples: int, *, replica_batch: int, num_replicas: int) -> int:
    """Return the number of global batches for `num_examples`, the last one padded."""
    return -(-num_examples // (replica_batch * num_replicas))


def eval_dataset(
    examples: tf.data.Dataset, split: Split, replica_batch: int, replicas: Replicas, parse: Callable[[Any], Batch]
) -> tf.data.Dataset:
    """Return the test batches of replicas, the same number for each, from a dataset of all examples.

    Over all replicas, every example has weight 1 exactly once; padding has weight 0. This task's part is converted once
    and cached in memory if it fits in `EVAL_CACHE_BYTES`, so always iterate over the whole dataset. `parse` converts a
    replica's part of the examples, `[B, ...]`.
    """
    global_batch = replica_batch * replicas.total
    num_steps = eval_batches(split.num_examples, replica_batch=replica_batch, num_replicas=replicas.total)
    num_batches = num_steps * replicas.count

    def task_part(examples_g: Any) -> tuple[Any, tf.Tensor]:
        """Pad the last global batch with its last example, and return this task's part and its weights, `[L, B]`."""
        positions_G, count = tf.range(global_batch), tf.shape(tf.nest.flatten(examples_g)[0])[0]

        def cut(part: tf.Tensor) -> tf.Tensor:
            shape = [replicas.total, replica_batch, *part.shape[1:]]
            return tf.reshape(part, shape)[replicas.first : replicas.first + replicas.count]

        padded = tf.nest.map_structure(lambda part: tf.gather(part, tf.minimum(positions_G, count - 1)), examples_g)
        return tf.nest.map_structure(cut, padded), cut(tf.cast(positions_G < count, tf.float32))

    def to_batch(part: Any, weights_B: tf.Tensor) -> Batch:
        return parse(part)._replace(weights=weights_B)

    parts = examples.batch(global_batch).map(task_part).unbatch()
    dataset = parts.map(to_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_batches))
    if num_batches * replica_batch * split.example_bytes <= EVAL_CACHE_BYTES:
        dataset = dataset.cache()
    return without_sharding(dataset.prefetch(tf.data.AUTOTUNE))


def rebatch(batches: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Cut or join infinite batches to batches of `size` examples, in the same order."""
    return without_sharding(batches.rebatch(size, drop_remainder=True).apply(INFINITE))


def without_sharding(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Prevent TensorFlow from sharding a dataset that is already one task's share."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
