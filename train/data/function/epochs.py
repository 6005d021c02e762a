"""Batches from a `tf.data.Dataset` that a function returns for each shard of the training split.

A shard belongs to a replica or a virtual shard. The function is traced once for each shard that this task reads, and
its dataset is built again in every epoch, with another seed. An epoch takes as many batches of each shard as steps
begin in it. A shard with fewer examples starts over, and one with more leaves the rest out, so that every shard has a
batch for every step and no replica waits for another one. A resumed run reads its epoch from the beginning and skips
the examples that it has trained on.

Shapes: B replica batch, G global batch, R replicas, L replicas of a task.
"""

import math
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from cluster.system.errors import ClusterError, RunFailed, UsageError
from cluster.system.messages import COMMAND
from train import named
from train.data import batches
from train.data.batches import Batch, BatchSlice, Replicas, without_sharding
from train.data.function import calling
from train.data.function.calling import PARTS, FunctionRecord, Shard

_WRONG_COUNT = re.compile(r"expected to contain (\d+) elements? but contained (only |at least )?(\d+)")


def read_examples(record: FunctionRecord, split: str, shard: Shard) -> tf.data.Dataset:
    """Return the examples of a shard, as `Batch`es of one example without the first axis."""
    dataset = calling.call_function(record.name, split, shard)
    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(f"--dataset {record.name!r} returned a tf.data.Dataset before; here {type(dataset).__name__}")
    description = calling.describe_dataset(record.name, split, dataset)
    if description != record.example:
        raise UsageError(
            f"--dataset {record.name!r}: {split} example is {calling.show_example(description)} in this task, "
            f"{calling.show_example(record.example)} where it was examined; let all tasks see the same data"
        )

    @tf.autograph.experimental.do_not_convert
    def stored(*parts: Any) -> Batch:
        parts = parts[0] if len(parts) == 1 else parts  # a named tuple
        cast = {
            name: named.each(lambda value, leaf: tf.cast(value, leaf.dtype), part, record.example[name])
            for name, part in zip(PARTS, parts, strict=False)
        }
        return Batch(cast["features"], cast["labels"], cast.get("weights", tf.ones([])))

    return dataset.map(stored, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def train_dataset(record: FunctionRecord, data_dir: Path, batch_slice: BatchSlice) -> tf.data.Dataset:
    """Return one batch for each replica, step by step."""
    shards = [shard_batches(record, data_dir, batch_slice, replica) for replica in batch_slice.replicas.numbers]
    in_turn = shards[0]
    if len(shards) > 1:
        in_turn = tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(len(shards)).repeat())
    # A distributed dataset keeps the shapes of its batches if it is known to be infinite.
    in_turn = in_turn.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return without_sharding(in_turn.take(batch_slice.num_batches).prefetch(tf.data.AUTOTUNE))


def shard_batches(record: FunctionRecord, data_dir: Path, batch_slice: BatchSlice, replica: int) -> tf.data.Dataset:
    """Return the infinite batches `[B, ...]` of one replica's shard."""
    num_examples, global_batch = record.counts["train"], batch_slice.global_batch
    replica_batch, first_step = batch_slice.replica_batch, tf.cast(batch_slice.first_step, tf.int64)

    def begin(epoch: tf.Tensor) -> tf.Tensor:
        return -(-epoch * num_examples // global_batch)

    @tf.autograph.experimental.do_not_convert
    def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
        shard = Shard(replica, batch_slice.replicas.total, epoch_seed(batch_slice.seed, epoch), data_dir)
        skipped = tf.maximum(first_step - begin(epoch), 0)
        num_examples_read = replica_batch * (begin(epoch + 1) - begin(epoch))
        whole = read_examples(record, "train", shard).repeat().take(num_examples_read)
        whole = whole.apply(tf.data.experimental.assert_cardinality(num_examples_read))
        return whole.skip(skipped * replica_batch).batch(replica_batch, drop_remainder=True)

    first_epoch = first_step * global_batch // num_examples
    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_batches)


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the seed of an epoch, an int64 scalar from 1."""
    key = tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.stateless_uniform([], key, minval=1, maxval=2**31 - 1, dtype=tf.int64, alg="philox")


def eval_dataset(record: FunctionRecord, data_dir: Path, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
    """Return the test batches of replicas; see `batches.eval_dataset`.

    Every task reads the whole split, as shard 0 of 1, and takes its part, so that all have the same number of batches.
    """
    count = record.counts["test"]
    whole = read_examples(record, "test", Shard(0, 1, epoch_seed(0, tf.constant(0)), data_dir))
    whole = whole.apply(tf.data.experimental.assert_cardinality(count))
    example_bytes = sum(math.prod(leaf.shape) * tf.as_dtype(leaf.dtype).size for leaf in record.leaves)
    return batches.eval_dataset(whole, count, example_bytes, replica_batch, replicas, lambda part: part)


def explain(error: Exception) -> ClusterError | None:
    """Translate TensorFlow's error about a dataset's length; None for other errors."""
    match = _WRONG_COUNT.search(str(error))
    if match is None:
        return None
    expected, actual = match[1], int(match[3])
    if not actual:
        return RunFailed(
            "the dataset function returned an empty shard; put examples into each shard, or use fewer replicas"
        )
    return RunFailed(
        f"the dataset function's test split has {match[2] or ''}{actual} examples, {expected} where it was examined; "
        f"run `{COMMAND} data.examine --fresh` on it, then start again"
    )
