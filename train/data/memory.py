"""In-memory data inside the graph: which examples a step uses is a pure function of (seed, step).

There is no iterator, so there is no iterator state: a run resumes at any step at once, and any number of replicas
that share a global batch see the same global batches in the same order.

Shapes: N examples, B replica batch, H height, W width, C channels.

Everything runs on the host's CPU: TensorFlow has the shuffle for the CPU alone, and a batch of bytes is small to send.
Under a strategy, `CPU:0` is the CPU of the task that runs the step.
"""

from __future__ import annotations

import tensorflow as tf

from train.data.arrays import ArrayFile, Split

Examples = tuple[tf.Tensor, tf.Tensor]
"""Images `[N, H, W, C] uint8` and labels `[N] int64`, or a batch of them."""

# `tf.random.experimental.index_shuffle` runs 4 rounds of its cipher. Measured over 60,000 examples and 40 epochs, the
# orders of two epochs then correlate up to 0.9 and batches are too even; with 8 rounds they match NumPy's permutations.
_ROUNDS = 8


def load(split: Split) -> Examples:
    """Return all of a split: images `[N, H, W, C] uint8`, labels `[N] int64`. Eagerly or inside a graph."""
    return _read(split.images), _read(split.labels)


def train_indices(
    step: tf.Tensor, replica: tf.Tensor, *, replica_batch: int, num_replicas: int, num_examples: int, seed: int
) -> tf.Tensor:
    """Return the examples of one replica at one step, `[B] int64`.

    The global batches of all steps, laid end to end, are one epoch after the other, each in an order of its own. Every
    example comes once an epoch; a batch may end one epoch and begin the next.

    Args:
        step: optimizer updates before this one, integer scalar, from 0.
        replica: number of the replica, integer scalar, from 0.
        seed: of the shuffle; the orders of two seeds are unrelated.

    Raises:
        ValueError: the replica batch is larger than an epoch, or TensorFlow cannot permute this many examples.
    """
    _check(num_examples, replica_batch)
    with tf.device("CPU:0"):
        first = (tf.cast(step, tf.int64) * num_replicas + tf.cast(replica, tf.int64)) * replica_batch
        positions_B = first + tf.range(replica_batch, dtype=tf.int64)
        epochs_B = positions_B // num_examples
        # At most two epochs meet in a batch, as it is no larger than one.
        keys = tf.stack([_key(seed, epochs_B[0]), _key(seed, epochs_B[0] + 1)])
        return tf.raw_ops.RandomIndexShuffle(
            index=positions_B % num_examples,
            seed=tf.gather(keys, epochs_B - epochs_B[0]),
            max_index=tf.constant(num_examples - 1, tf.int64),
            rounds=_ROUNDS,
        )


def train_batch(
    examples: Examples, step: tf.Tensor, replica: tf.Tensor, *, replica_batch: int, num_replicas: int, seed: int
) -> Examples:
    """Return one replica's part of the global batch of `step`: images `[B, H, W, C] uint8`, labels `[B] int64`.

    Args:
        examples: from `load`.
        step, replica, replica_batch, num_replicas, seed: as for `train_indices`.
    """
    num_examples = examples[1].shape[0]
    indices_B = train_indices(
        step, replica, replica_batch=replica_batch, num_replicas=num_replicas, num_examples=num_examples, seed=seed
    )
    return _gather(examples, indices_B)


def eval_batches(num_examples: int, *, replica_batch: int, num_replicas: int) -> int:
    """Return how many global batches cover `num_examples`, the last one padded."""
    return -(-num_examples // (replica_batch * num_replicas))


def eval_batch(
    examples: Examples, batch: tf.Tensor, replica: tf.Tensor, *, replica_batch: int, num_replicas: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return one replica's part of a global batch to evaluate, in the order of the file.

    Over all replicas and `eval_batches` batches, every example has weight 1 once; padding has weight 0.

    Args:
        examples: from `load`.
        batch: number of the global batch, integer scalar, from 0.
        replica: number of the replica, integer scalar, from 0.

    Returns:
        images `[B, H, W, C] uint8`, labels `[B] int64`, weights `[B] float32`.
    """
    num_examples = examples[1].shape[0]
    with tf.device("CPU:0"):
        first = (tf.cast(batch, tf.int64) * num_replicas + tf.cast(replica, tf.int64)) * replica_batch
        positions_B = first + tf.range(replica_batch, dtype=tf.int64)
        weights_B = tf.cast(positions_B < num_examples, tf.float32)
        images_BHWC, labels_B = _gather(examples, tf.minimum(positions_B, num_examples - 1))
    return images_BHWC, labels_B, weights_B


def _read(file: ArrayFile) -> tf.Tensor:
    with tf.device("CPU:0"):
        flat = tf.io.decode_raw(tf.io.read_file(str(file.path)), tf.as_dtype(file.dtype), little_endian=True)
        return tf.reshape(flat, file.shape)


def _gather(examples: Examples, indices_B: tf.Tensor) -> Examples:
    images_NHWC, labels_N = examples
    with tf.device("CPU:0"):
        return tf.gather(images_NHWC, indices_B), tf.gather(labels_N, indices_B)


def _key(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the shuffle's key for one epoch, `[3] uint32`.

    Drawn, not just [seed, epoch, 0]: for up to 65,536 examples the shuffle uses the low 8 bits of each word alone, so
    that seeds 7 and 263 would be one.
    """
    return tf.random.stateless_uniform(
        [3], tf.stack([tf.constant(seed, tf.int64), epoch]), minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )


def _check(num_examples: int, replica_batch: int) -> None:
    if not 1 <= replica_batch <= num_examples:
        raise ValueError(f"replica_batch={replica_batch} is not between 1 and the {num_examples} examples")
    bits = (num_examples - 1).bit_length() - 1
    if bits >= 16 and bits % 2 == 0 and num_examples - 1 == 1 << bits:
        # TensorFlow sizes its cipher by ceil(log2(num_examples - 1)), here one bit short: two examples would collide.
        raise ValueError(f"RandomIndexShuffle is no permutation of {num_examples} examples; leave one out")
