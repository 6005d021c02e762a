"""TFRecord shards as a stream: the examples of a step are a pure function of (seed, step), as in `feeds`.

An epoch is all shards in a random order of (seed, epoch), cut into windows of `WINDOW_SHARDS` shards. A window is read
in parallel and its examples are shuffled by a permutation of (seed, epoch, window). The concatenated epochs are cut
into global batches, from which each task takes its replicas' part before it parses anything. So the order does not
depend on the number of tasks or replicas, every example occurs once an epoch, and a run resumes by computing the window
of its step, without reading the windows before.

Every task reads all shards and holds about three windows of records in memory: the one in use, the next one, and a copy
of that while it is shuffled; and the bytes of a shard while it is checked. More shards make smaller windows.

Shapes: S shards, W shards of a window, n examples of a window, G global batch, B replica batch, L replicas of a task.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from train.data import batches, blocks
from train.data.batches import INFINITE, Batch, BatchSlice, Replicas, without_sharding
from train.data.dataset_record import Split
from train.data.sources import Source

WINDOW_SHARDS = 4
"""Shards that are shuffled together."""

_BLOCK = 16  # examples to take from a shard before the next one


@dataclass(frozen=True, kw_only=True)
class ShardSource(Source):
    """Examples in TFRecord shards."""

    @property
    def num_shards(self) -> int:
        return len(self.record.train.files)

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        split, seed, replicas = self.record.train, batch_slice.seed, batch_slice.replicas
        replica_batch, global_batch = batch_slice.replica_batch, batch_slice.global_batch
        first_window, skipped = _find_position(split, seed, batch_slice.first_step * global_batch)

        def window(number: tf.Tensor) -> tf.data.Dataset:
            return _read_window(split, seed, number, tf.where(number == first_window, skipped, 0))

        def task_part(raw_G: tf.Tensor) -> tf.Tensor:
            return tf.reshape(raw_G, [replicas.total, replica_batch])[replicas.first : replicas.first + replicas.count]

        parse = _parser(split, replica_batch)
        raw = tf.data.Dataset.range(first_window, tf.int64.max).flat_map(window).prefetch(1)
        raw = raw.rebatch(global_batch, drop_remainder=True)
        parsed = raw.map(task_part).unbatch().map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return without_sharding(parsed.apply(INFINITE).prefetch(tf.data.AUTOTUNE))

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        split = self.record.test
        raw = _interleave(split, tf.range(len(split.files), dtype=tf.int64))
        return batches.eval_dataset(raw, split, replica_batch, replicas, _parser(split, replica_batch))


def _counts(split: Split) -> tf.Tensor:
    """Return the examples in each shard, `[S] int64`."""
    return tf.constant([file.num_examples for file in split.files], tf.int64)


def _key(seed: int, epoch: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return the key of a shuffle in an epoch: 0 that of the shards, above 0 that of a window's examples."""
    fold = functools.partial(tf.random.fold_in, alg="philox")  # the default algorithm depends on the device
    return fold(fold(tf.constant([seed, 0], tf.int64), epoch), number)


def _order(split: Split, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the order of the shards in an epoch, `[S] int64`."""
    key = _key(seed, epoch, tf.constant(0, tf.int64))
    return tf.random.experimental.stateless_shuffle(tf.range(len(split.files), dtype=tf.int64), key, alg="philox")


def _find_position(split: Split, seed: int, position: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the window of an example, counted over all epochs, and its index there."""
    with tf.device("CPU:0"):
        position = tf.cast(position, tf.int64)
        epoch, left = position // split.num_examples, position % split.num_examples
        counts_S = tf.gather(_counts(split), _order(split, seed, epoch))
        starts = tf.cumsum(counts_S, exclusive=True)[::WINDOW_SHARDS]
        window = tf.searchsorted(starts, [left], side="right", out_type=tf.int64)[0] - 1
        return epoch * tf.size(starts, tf.int64) + window, left - starts[window]


def _read_window(split: Split, seed: int, number: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
    """Return one window as a dataset of one element: its shuffled records, `[n] string`, without the skipped ones."""
    num_windows = -(-len(split.files) // WINDOW_SHARDS)
    epoch, window = number // num_windows, number % num_windows
    shards_W = _order(split, seed, epoch)[window * WINDOW_SHARDS : (window + 1) * WINDOW_SHARDS]
    count = tf.reduce_sum(tf.gather(_counts(split), shards_W))
    key = _key(seed, epoch, window + 1)

    def shuffle(raw_n: tf.Tensor) -> tf.Tensor:
        complete = tf.debugging.assert_equal(
            tf.size(raw_n, tf.int64), count, "the shards hold more or fewer examples than their index says"
        )
        with tf.control_dependencies([complete]):  # otherwise an index may be out of range first
            order_n = tf.random.experimental.stateless_shuffle(tf.range(count), key, alg="philox")
        return tf.gather(raw_n, order_n[skipped:])

    return _interleave(split, shards_W).batch(count).map(shuffle)


def _interleave(split: Split, shards_W: tf.Tensor) -> tf.data.Dataset:
    """Interleave the records of shards, read in parallel, in a fixed order; each shard is checked when it is opened."""
    hashes = tf.ragged.constant([file.blocks for file in split.files], tf.int64).to_tensor()
    blocks_S = tf.constant([len(file.blocks) for file in split.files])

    def checked(shard: tf.Tensor) -> tf.Tensor:
        path = tf.constant([str(file.path) for file in split.files])[shard]
        with tf.control_dependencies([blocks.read_checked(path, hashes[shard][: blocks_S[shard]])]):
            return tf.identity(path)

    return (
        tf.data.Dataset.from_tensor_slices(shards_W)
        .map(checked)
        .interleave(
            tf.data.TFRecordDataset,
            cycle_length=WINDOW_SHARDS,
            block_length=_BLOCK,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
    )


def _parser(split: Split, replica_batch: int) -> Callable[[tf.Tensor], Batch]:
    features_leaf, labels_leaf = split.example["features"], split.example["labels"]
    fields = {
        "features": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature(labels_leaf.shape, labels_leaf.dtype),
    }
    if "weights" in split.example:
        fields["weight"] = tf.io.FixedLenFeature([], tf.float32)

    def parse(raw_B: tf.Tensor) -> Batch:
        values = tf.io.parse_example(raw_B, fields)
        flat = tf.io.decode_raw(values["features"], tf.as_dtype(features_leaf.dtype), little_endian=True)
        features = tf.reshape(flat, [replica_batch, *features_leaf.shape])
        return Batch(features, values["label"], values.get("weight", tf.ones([replica_batch])))

    return parse
