"""From examples to the batches of replicas.

If any example can be read by its number, the examples of a step are a pure function of (seed, step). Without iterator
state, a run resumes at any step immediately, and the global batches and their order are the same for any number of
replicas. Arrays are gathered inside the step, from host memory of the replica's task; all other data comes from an
iterator.

Shapes: N examples, B replica batch, K labels of an example where it has more than one.

Everything runs on the host's CPU: TensorFlow can shuffle only on the CPU, and a batch of bytes is quickly transferred.
Under a strategy, `CPU:0` is the CPU of the task that runs the step.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from cluster.system.errors import UsageError
from train import named
from train.config import TrainConfig
from train.data import blocks
from train.data.batches import Batch, BatchSlice, Replicas, VirtualShards, eval_batches, rebatch, without_sharding
from train.data.dataset_record import Split
from train.data.sources import Examples, Source
from train.named import Named


def by_step(
    batch: Callable[[tf.Tensor, tf.Tensor], Batch],
    positions: tf.data.Dataset,
    replicas: Replicas,
    first_step: int | tf.Tensor = 0,
) -> tf.data.Dataset:
    """Return a dataset with one batch for each replica, step by step; `positions` counts the batches from 0."""

    @tf.autograph.experimental.do_not_convert
    def at(position: tf.Tensor) -> Batch:
        return batch(first_step + position // replicas.count, replicas.first + position % replicas.count)

    batches = positions.map(at, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return without_sharding(batches.prefetch(tf.data.AUTOTUNE))


class IndexedSource(Source):
    """Examples that can be read by number."""

    @abc.abstractmethod
    def examples(self, split: str) -> Examples: ...

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        batch = partial(train_batch, self.examples("train"), batch_slice=batch_slice)
        return by_step(batch, tf.data.Dataset.counter(), batch_slice.replicas, batch_slice.first_step)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        sizes = {"replica_batch": replica_batch, "num_replicas": replicas.total}
        batch = partial(eval_batch, self.examples("test"), **sizes)
        num_batches = eval_batches(self.test_examples, **sizes) * replicas.count
        return by_step(batch, tf.data.Dataset.range(num_batches), replicas)


@dataclass(frozen=True, kw_only=True)
class ArraySource(IndexedSource):
    """Examples of prepared arrays."""

    in_memory: bool = True

    def examples(self, split: str) -> Examples:
        return load_examples(self.record.splits[split])


class ArrayExamples(NamedTuple):
    """A whole split in memory; several features or labels are dictionaries of tensors."""

    features: Named
    """`[N, ...]` uint8, int32, int64 or float32."""
    labels: Named
    """`[N]` or `[N, K]`, int64 or float32."""
    weights: tf.Tensor | None
    """`[N] float32`; None if the split has none."""

    @property
    def num_examples(self) -> int:
        return int(named.leaves(self.features)[0].shape[0])

    def read_batch(self, indices_B: tf.Tensor) -> Batch:
        features, labels = (
            named.each(lambda array: tf.gather(array, indices_B), part) for part in (self.features, self.labels)
        )
        weights_B = tf.ones(indices_B.shape) if self.weights is None else tf.gather(self.weights, indices_B)
        return Batch(features, labels, weights_B)


# `tf.random.experimental.index_shuffle` runs 4 rounds of its cipher. Measured over 60,000 examples and 40 epochs, the
# orders of two epochs then correlate up to 0.9 and batches are too even; with 8 rounds they match NumPy's permutations.
_ROUNDS = 8


def load_examples(split: Split) -> ArrayExamples:
    """Read a whole split of arrays and check its blocks, eagerly or inside a graph."""
    arrays = []
    with tf.device("CPU:0"):
        for file, leaf in zip(split.files, split.leaves, strict=True):
            raw = blocks.read_checked(str(file.path), file.blocks)
            flat = tf.io.decode_raw(raw, tf.as_dtype(leaf.dtype), little_endian=True)
            arrays.append(tf.reshape(flat, [split.num_examples, *leaf.shape]))
    parts = split.join(arrays)
    return ArrayExamples(parts["features"], parts["labels"], parts.get("weights"))


def train_indices(step: tf.Tensor, replica: tf.Tensor, batch_slice: BatchSlice, num_examples: int) -> tf.Tensor:
    """Return the numbers of one replica's examples in one step, `[B] int64`.

    The concatenated global batches of all steps are one epoch after the other, each in a different order. Every example
    occurs once per epoch; a batch may span two epochs.
    """
    check_sizes(num_examples, batch_slice.replica_batch)
    with tf.device("CPU:0"):
        positions_B = _positions(step, replica, batch_slice.replica_batch, batch_slice.replicas.total)
        epochs_B = positions_B // num_examples
        # A batch is not larger than an epoch, so it has examples of at most two epochs.
        keys = tf.stack([_shuffle_key(batch_slice.seed, epochs_B[0] + number) for number in range(2)])
        return tf.raw_ops.RandomIndexShuffle(
            index=positions_B % num_examples,
            seed=tf.gather(keys, epochs_B - epochs_B[0]),
            max_index=tf.constant(num_examples - 1, tf.int64),
            rounds=_ROUNDS,
        )


def _positions(step: tf.Tensor, replica: tf.Tensor, replica_batch: int, num_replicas: int) -> tf.Tensor:
    """Return the positions of a replica's examples among those of all steps, `[B] int64`."""
    first = (tf.cast(step, tf.int64) * num_replicas + tf.cast(replica, tf.int64)) * replica_batch
    return first + tf.range(replica_batch, dtype=tf.int64)


def _shuffle_key(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the shuffle's key for one epoch, `[3] uint32`.

    It is random and not [seed, epoch, 0], because for up to 65,536 examples the shuffle uses only the low 8 bits of
    each word, so that seeds 7 and 263 would be equal.
    """
    return tf.random.stateless_uniform(
        [3], tf.stack([tf.constant(seed, tf.int64), epoch]), minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )


def check_sizes(num_examples: int, replica_batch: int) -> None:
    """Check that a replica's batch is not larger than the data, and that the data can be shuffled."""
    if not 1 <= replica_batch <= num_examples:
        raise UsageError(f"--global-batch: a part of a step has {replica_batch} examples; expected 1 to {num_examples}")
    bits = (num_examples - 1).bit_length() - 1
    if bits >= 16 and bits % 2 == 0 and num_examples - 1 == 1 << bits:
        # TensorFlow sizes its cipher by ceil(log2(num_examples - 1)), here one bit short: two examples would collide.
        raise UsageError(f"{num_examples} examples: TensorFlow cannot shuffle exactly this number; leave one out")


def train_batch(examples: Examples, step: tf.Tensor, replica: tf.Tensor, batch_slice: BatchSlice) -> Batch:
    """Return one replica's part of the global batch of `step`; see `train_indices` for the arguments."""
    indices_B = train_indices(step, replica, batch_slice, examples.num_examples)
    with tf.device("CPU:0"):
        return examples.read_batch(indices_B)


def eval_batch(
    examples: Examples, batch: tf.Tensor, replica: tf.Tensor, *, replica_batch: int, num_replicas: int
) -> Batch:
    """Return one replica's part of the global test batch number `batch`, in the order of the file.

    Over all replicas and `eval_batches` batches, every example has weight 1 exactly once; padding has weight 0. The
    weights of the split are only for training: evaluation measures a plain mean.
    """
    num_examples = examples.num_examples
    with tf.device("CPU:0"):
        positions_B = _positions(batch, replica, replica_batch, num_replicas)
        weights_B = tf.cast(positions_B < num_examples, tf.float32)
        return examples.read_batch(tf.minimum(positions_B, num_examples - 1))._replace(weights=weights_B)


@dataclass(frozen=True)
class Feed:
    """The source of the batches of one loop.

    `next` is called once per step, in cross-replica context; each replica gets its result. `batch` is called by each
    replica with that result, the step and the number of the replica or of one of its virtual shards. With `ahead`,
    `next` may be called one step early, so that a batch can arrive during the step before.
    """

    next: Callable[[], Any]
    batch: Callable[[Any, tf.Tensor, tf.Tensor], Batch]
    ahead: bool = False


def gathering_feed(examples: Examples, batch_slice: BatchSlice) -> Feed:
    """Return training batches that are gathered inside the step."""
    return Feed(lambda: (), lambda _next, step, part: train_batch(examples, step, part, batch_slice))


def train_feed(
    strategy: tf.distribute.Strategy,
    source: Source,
    config: TrainConfig,
    first_step: int = 0,
    cut: VirtualShards | None = None,
) -> Feed:
    """Return the training batches of a synchronous strategy's replicas from step `first_step`.

    `cut` has the virtual shards of every global batch; None for one per replica. `Feed.batch` takes the number of a
    micro-batch, counted over all shards.
    """
    global_batch, seed, micro_batches = config.global_batch, config.seed, config.micro_batches
    replicas = strategy.num_replicas_in_sync
    shards = cut or VirtualShards(replicas, replicas)
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    examples = source.examples("train") if source.in_memory and not on_tpu else None
    if examples is not None:
        return gathering_feed(examples, BatchSlice(global_batch, seed, replicas=Replicas(shards.total * micro_batches)))
    whole = cut is None and micro_batches == 1

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = Replicas.from_context(context).numbers
        first, last = (shards.first(replica) for replica in (replicas.start, replicas.stop))
        batch_slice = BatchSlice(global_batch, seed, first_step, replicas=Replicas(shards.total, first, last - first))
        batches = source.train_dataset(batch_slice)
        if whole:
            return batches
        return _stack(rebatch(batches, batch_slice.replica_batch // micro_batches), shards, micro_batches, replicas)

    def batch(batches: Batch, _step: tf.Tensor, part: tf.Tensor) -> Batch:
        if whole:
            return batches
        place = shards.place(part // micro_batches) * micro_batches + part % micro_batches
        return tf.nest.map_structure(lambda tensor: tensor[place], batches)

    iterator = iter(strategy.distribute_datasets_from_function(dataset))
    return Feed(iterator.get_next, batch, ahead=not on_tpu)  # not tested on TPUs


def _stack(batches: tf.data.Dataset, shards: VirtualShards, micro_batches: int, replicas: range) -> tf.data.Dataset:
    """Stack the batches of all parts of each replica's shards, `[most, B, ...]`.

    The last part of a replica with fewer shards is repeated, because all must have the same shape.
    """
    firsts = {replica: shards.first(replica) * micro_batches for replica in range(replicas.start, replicas.stop + 1)}
    most = shards.most * micro_batches
    places = [[min(firsts[r] + at, firsts[r + 1] - 1) for at in range(most)] for r in replicas]
    index_Lm = tf.constant(places) - firsts[replicas.start]

    def by_replica(parts: Batch) -> Batch:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, index_Lm), parts)

    steps = batches.batch(firsts[replicas.stop] - firsts[replicas.start], drop_remainder=True)
    return without_sharding(steps.map(by_replica).unbatch())


def eval_feed(strategy: tf.distribute.Strategy | None, source: Source, replica_batch: int) -> Feed:
    """Return the test split's batches; `Feed.batch` takes their number as the step. Every pass must use all of them."""
    replicas = strategy.num_replicas_in_sync if strategy else 1
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    examples = source.examples("test") if source.in_memory and not on_tpu else None
    if examples is not None:
        sizes = {"replica_batch": replica_batch, "num_replicas": replicas}
        return Feed(lambda: (), lambda _next, at, replica: eval_batch(examples, at, replica, **sizes))

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return source.eval_dataset(replica_batch, Replicas.from_context(context)).repeat()

    # One iterator for all passes, because a new one would need a new graph.
    iterator = iter(
        strategy.distribute_datasets_from_function(dataset) if strategy else dataset(tf.distribute.InputContext())
    )
    return Feed(iterator.get_next, lambda batch, _at, _replica: batch)
