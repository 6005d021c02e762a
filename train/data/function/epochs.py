"""Batches from a `tf.data.Dataset` that a function returns for each shard of the training split.

A shard is a replica's, or a virtual shard's. The function is traced once for each shard that this task reads, and its
dataset is made anew in every epoch, with another seed. Epoch e takes its steps: as many batches of each shard as steps
begin in it. A shard with fewer examples begins again, one with more leaves the rest out; so every shard gives every
step its batch, and no replica waits for another one's. A resumed run reads the epoch that it is in from its beginning,
and skips what was trained on: that costs reading it once more.

Shapes: B replica batch, G global batch, R replicas, L replicas of a task.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.system.errors import ClusterError, RunFailed, UsageError
from train.data.batches import Batch, BatchSlice, Replicas, eval_batches, own_share
from train.data.function import calling
from train.data.function.calling import Shard
from train.data.function.record import PARTS, Record, leaves

EVAL_CACHE_BYTES = 1 << 30
"""A task keeps its part of the examples to evaluate in memory if it is no larger than this."""
_WRONG_COUNT = re.compile(r"expected to contain (\d+) elements? but contained (only |at least )?(\d+)")


def examples(record: Record, split: str, shard: Shard) -> tf.data.Dataset:
    """Return the examples of a shard, as `Batch`es of one without their first axis.

    Raises:
        UsageError: they are not as they were where the function was examined.
    """
    dataset = calling.call(record.name, split, shard)
    what = f"--dataset {record.name!r}: {split} example"
    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(f"--dataset {record.name!r} returned a tf.data.Dataset before; here {type(dataset).__name__}")
    given = calling.describe(what, calling.parts_of(what, dataset.element_spec))
    if given != record.example:
        raise UsageError(
            f"{what} is {given} in this task, {record.example} where it was examined; let all tasks see the same data"
        )

    @tf.autograph.experimental.do_not_convert
    def stored(*parts: Any) -> Batch:
        parts = parts[0] if len(parts) == 1 else parts  # a named tuple
        cast = {
            name: calling.each(lambda value, leaf: tf.cast(value, leaf["dtype"]), part, record.example[name])
            for name, part in zip(PARTS, parts, strict=False)
        }
        return Batch(cast["features"], cast["labels"], cast.get("weights", tf.ones([])))

    return dataset.map(stored, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def train_dataset(record: Record, data_dir: Path, batch_slice: BatchSlice) -> tf.data.Dataset:
    """Return the batches of some replicas, step by step one for each."""
    shards = [shard_batches(record, data_dir, batch_slice, replica) for replica in batch_slice.replicas.numbers]
    batches = shards[0]
    if len(shards) > 1:
        batches = tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(len(shards)).repeat())
    # Known to be without end, a distributed dataset keeps the shapes of its batches.
    batches = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return own_share(batches.take(batch_slice.num_batches).prefetch(tf.data.AUTOTUNE))


def shard_batches(
    record: Record, data_dir: Path, batch_slice: BatchSlice, replica: int, worker: int = 0, workers: int = 1
) -> tf.data.Dataset:
    """Return the batches `[B, ...]` of one replica's shard without end.

    Args:
        record: of the dataset function.
        data_dir: the folder of prepared data.
        batch_slice: which batches, of which replica's shards are read here.
        replica: number of the replica.
        worker: the data worker that prepares them: it has every step whose remainder by `workers` is its number, from a
            shard of its own.
        workers: data workers that take turns.
    """
    num_examples, global_batch = record.counts["train"], batch_slice.global_batch
    replica_batch, first_step = batch_slice.replica_batch, tf.cast(batch_slice.first_step, tf.int64)
    index, count = replica * workers + worker, batch_slice.replicas.total * workers

    def begin(epoch: tf.Tensor) -> tf.Tensor:
        return -(-epoch * num_examples // global_batch)

    def batches_before(step: tf.Tensor) -> tf.Tensor:
        return (step - worker + workers - 1) // workers

    @tf.autograph.experimental.do_not_convert
    def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
        shard = Shard(index, count, epoch_seed(batch_slice.seed, epoch), data_dir)
        skipped = tf.maximum(batches_before(first_step) - batches_before(begin(epoch)), 0)
        batches = batches_before(begin(epoch + 1)) - batches_before(begin(epoch))
        whole = examples(record, "train", shard).repeat().take(batches * replica_batch)
        whole = whole.apply(tf.data.experimental.assert_cardinality(batches * replica_batch))
        return whole.skip(skipped * replica_batch).batch(replica_batch, drop_remainder=True)

    first_epoch = first_step * global_batch // num_examples
    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_batches)


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the seed of an epoch, an int64 scalar from 1."""
    key = tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.stateless_uniform([], key, minval=1, maxval=2**31 - 1, dtype=tf.int64, alg="philox")


def own_order(record: Record, data_dir: Path, global_batch: int, seed: int) -> tf.data.Dataset:
    """Return global batches without end for one of several workers that read alike, from an epoch that it draws.

    Every worker runs the same graph and does not know which one it is.
    """
    epoch = tf.raw_ops.RandomUniformInt(
        shape=tf.constant([], tf.int32),
        minval=tf.constant(0, tf.int64),
        maxval=tf.constant(2**20, tf.int64),
        seed=0,
        seed2=0,
    )
    steps = record.counts["train"] * epoch // global_batch
    return shard_batches(record, data_dir, BatchSlice(global_batch, seed, steps), 0).prefetch(tf.data.AUTOTUNE)


def eval_dataset(record: Record, data_dir: Path, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
    """Return the batches of some replicas to evaluate, as `memory.eval_dataset` does.

    Every task reads the whole split, as shard 0 of 1, and cuts its own part out: so all have as many batches. What it
    evaluates is kept in memory where it fits `EVAL_CACHE_BYTES`; use the whole dataset each time.
    """
    count, global_batch = record.counts["test"], replica_batch * replicas.total
    batches = eval_batches(count, replica_batch=replica_batch, num_replicas=replicas.total)
    own = slice(replicas.first, replicas.first + replicas.count)

    def own_part(batch: Batch) -> Batch:
        """Fill the last global batch up with its last example, then cut this task's part out: both `[L, B, ...]`."""
        positions_G, given = tf.range(global_batch), tf.size(batch.weights)

        def cut(part: tf.Tensor) -> tf.Tensor:
            filled_G = tf.gather(part, tf.minimum(positions_G, given - 1))
            return tf.reshape(filled_G, [replicas.total, replica_batch, *part.shape[1:]])[own]

        weights_RB = tf.reshape(tf.cast(positions_G < given, tf.float32), [replicas.total, replica_batch])
        parts: Batch = tf.nest.map_structure(cut, batch._replace(weights=()))
        return parts._replace(weights=weights_RB[own])

    whole = examples(record, "test", Shard(0, 1, epoch_seed(0, tf.constant(0)), data_dir))
    whole = whole.apply(tf.data.experimental.assert_cardinality(count)).batch(global_batch)
    dataset = whole.map(own_part).unbatch()
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(batches * replicas.count))
    if batches * replicas.count * replica_batch * example_bytes(record) <= EVAL_CACHE_BYTES:
        dataset = dataset.cache()
    return own_share(dataset.prefetch(tf.data.AUTOTUNE))


def example_bytes(record: Record) -> int:
    """Return the size of one example."""
    of_all = [leaf for part in record.example.values() for leaf in leaves(part)]
    return sum(int(np.prod(leaf["shape"])) * tf.as_dtype(leaf["dtype"]).size for leaf in of_all)


def explain(error: Exception) -> ClusterError | None:
    """Return what an error of TensorFlow says of a dataset's length; None where it says something else."""
    match = _WRONG_COUNT.search(str(error))
    if match is None:
        return None
    expected, found = match[1], int(match[3])
    if not found:
        return RunFailed("the dataset function returned an empty shard; give each examples, or use fewer replicas")
    return RunFailed(
        f"the dataset function's test split has {match[2] or ''}{found} examples, {expected} where it was examined; "
        "run `invoke data.examine --fresh` on it, then start again"
    )
