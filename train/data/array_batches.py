"""In-memory data inside the graph: the examples of a step are a pure function of (seed, step).

There is no iterator and no iterator state: a run resumes at any step immediately, and any number of replicas that share
a global batch has the same global batches in the same order.

Shapes: N examples, B replica batch, K labels of an example where it has more than one.

Everything runs on the host's CPU: TensorFlow can shuffle only on the CPU, and a batch of bytes is quickly transferred.
Under a strategy, `CPU:0` is the CPU of the task that runs the step.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from cluster.system.errors import UsageError
from train import named
from train.data import blocks
from train.data.arrays import ArrayFile, Split
from train.data.batches import Batch, BatchSlice, Replicas, by_step, eval_batches
from train.named import Named


class Examples(NamedTuple):
    """A whole split; several features or labels are dictionaries of tensors."""

    features: Named
    """`[N, ...]` uint8, int32, int64 or float32."""
    labels: Named
    """`[N]` or `[N, K]`, int64 or float32."""
    weights: tf.Tensor | None
    """`[N] float32`; None if the split has none."""

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return int(named.leaves(self.features)[0].shape[0])

    def batch(self, indices_B: tf.Tensor, weights_B: tf.Tensor) -> Batch:
        """Return the examples with these indices and weights."""
        features, labels = (
            named.each(lambda array: tf.gather(array, indices_B), part) for part in (self.features, self.labels)
        )
        return Batch(features, labels, weights_B)


# `tf.random.experimental.index_shuffle` runs 4 rounds of its cipher. Measured over 60,000 examples and 40 epochs, the
# orders of two epochs then correlate up to 0.9 and batches are too even; with 8 rounds they match NumPy's permutations.
_ROUNDS = 8


def load(split: Split) -> Examples:
    """Read a whole split and check its blocks, eagerly or inside a graph."""
    features, labels = named.each(_read, split.features), named.each(_read, split.labels)
    return Examples(features, labels, None if split.weights is None else _read(split.weights))


def train_indices(step: tf.Tensor, replica: tf.Tensor, batch_slice: BatchSlice, num_examples: int) -> tf.Tensor:
    """Return the indices of the examples of one replica in one step, `[B] int64`.

    The concatenated global batches of all steps are one epoch after the other, each in a different order. Every example
    occurs once an epoch; a batch may end one epoch and begin the next.
    """
    replica_batch, num_replicas, seed = batch_slice.replica_batch, batch_slice.replicas.total, batch_slice.seed
    _check(num_examples, replica_batch)
    with tf.device("CPU:0"):
        first = (tf.cast(step, tf.int64) * num_replicas + tf.cast(replica, tf.int64)) * replica_batch
        positions_B = first + tf.range(replica_batch, dtype=tf.int64)
        epochs_B = positions_B // num_examples
        # A batch is not larger than an epoch, so it has examples of at most two epochs.
        keys = tf.stack([_key(seed, epochs_B[0]), _key(seed, epochs_B[0] + 1)])
        return tf.raw_ops.RandomIndexShuffle(
            index=positions_B % num_examples,
            seed=tf.gather(keys, epochs_B - epochs_B[0]),
            max_index=tf.constant(num_examples - 1, tf.int64),
            rounds=_ROUNDS,
        )


def train_batch(examples: Examples, step: tf.Tensor, replica: tf.Tensor, batch_slice: BatchSlice) -> Batch:
    """Return one replica's part of the global batch of `step`; see `train_indices` for the arguments."""
    replica_batch = batch_slice.replica_batch
    indices_B = train_indices(step, replica, batch_slice, examples.num_examples)
    with tf.device("CPU:0"):
        weights_B = tf.ones([replica_batch]) if examples.weights is None else tf.gather(examples.weights, indices_B)
        return examples.batch(indices_B, weights_B)


def eval_batch(
    examples: Examples, batch: tf.Tensor, replica: tf.Tensor, *, replica_batch: int, num_replicas: int
) -> Batch:
    """Return one replica's part of the global test batch number `batch`, in the order of the file.

    Over all replicas and `eval_batches` batches, every example has weight 1 once; padding has weight 0. The weights of
    the split are only for training: evaluation measures a plain mean.
    """
    num_examples = examples.num_examples
    with tf.device("CPU:0"):
        first = (tf.cast(batch, tf.int64) * num_replicas + tf.cast(replica, tf.int64)) * replica_batch
        positions_B = first + tf.range(replica_batch, dtype=tf.int64)
        weights_B = tf.cast(positions_B < num_examples, tf.float32)
        indices_B = tf.minimum(positions_B, num_examples - 1)
        return examples.batch(indices_B, weights_B)


def train_dataset(split: Split, batch_slice: BatchSlice) -> tf.data.Dataset:
    """Return the batches of `train_batch` as a dataset, for Keras and TPUs.

    The batches have static shapes, as `tf.distribute.Strategy.distribute_datasets_from_function` requires.
    """
    examples = load(split)

    def batch(step: tf.Tensor, replica: tf.Tensor) -> Batch:
        return train_batch(examples, step, replica, batch_slice)

    return by_step(batch, batch_slice.num_batches, batch_slice.replicas, batch_slice.first_step)


def eval_dataset(split: Split, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
    """Return the batches of `eval_batch` as a dataset, with the same number for every replica."""
    examples, sizes = load(split), {"replica_batch": replica_batch, "num_replicas": replicas.total}

    def batch(number: tf.Tensor, replica: tf.Tensor) -> Batch:
        return eval_batch(examples, number, replica, **sizes)

    return by_step(batch, eval_batches(split.num_examples, **sizes) * replicas.count, replicas)


def _read(file: ArrayFile) -> tf.Tensor:
    with tf.device("CPU:0"):
        raw = blocks.read(str(file.path), file.blocks)
        flat = tf.io.decode_raw(raw, tf.as_dtype(file.dtype), little_endian=True)
        return tf.reshape(flat, file.shape)


def _key(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the shuffle's key for one epoch, `[3] uint32`.

    It is random and not [seed, epoch, 0], because for up to 65,536 examples the shuffle uses only the low 8 bits of
    each word, so that seeds 7 and 263 would be equal.
    """
    return tf.random.stateless_uniform(
        [3], tf.stack([tf.constant(seed, tf.int64), epoch]), minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )


def _check(num_examples: int, replica_batch: int) -> None:
    if not 1 <= replica_batch <= num_examples:
        raise UsageError(f"{replica_batch} examples per replica: expected 1 to {num_examples}, the number of examples")
    bits = (num_examples - 1).bit_length() - 1
    if bits >= 16 and bits % 2 == 0 and num_examples - 1 == 1 << bits:
        # TensorFlow sizes its cipher by ceil(log2(num_examples - 1)), here one bit short: two examples would collide.
        raise UsageError(f"{num_examples} examples: TensorFlow cannot shuffle exactly this number; leave one out")
