"""The batches of the replicas of a strategy.

Arrays are gathered inside the step, from host memory of the replica's task; all other data comes from an iterator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from train.data.batches import Batch, BatchSlice, Replicas, VirtualShards, rebatch, without_sharding
from train.data.indexed import eval_batch, train_batch
from train.data.sources import Source


@dataclass(frozen=True)
class Feed:
    """The batches of the steps of one loop.

    Attributes:
        next: called once a step, in cross-replica context; its result is passed to each replica.
        batch: called by each replica with that result, the step and the number of the replica or of one of its virtual
            shards; returns its batch.
        ahead: whether `next` may be called one step early, so that a batch can arrive during the step before.
    """

    next: Callable[[], Any]
    batch: Callable[[Any, tf.Tensor, tf.Tensor], Batch]
    ahead: bool = False


def train_feed(
    strategy: tf.distribute.Strategy,
    source: Source,
    first_step: int,
    global_batch: int,
    seed: int,
    cut: VirtualShards | None = None,
    micro_batches: int = 1,
) -> Feed:
    """Return the training batches of a synchronous strategy's replicas from step `first_step`.

    `cut` has the virtual shards of every global batch; None for one per replica. Each shard has `micro_batches`, and
    `Feed.batch` takes the number of one of all, in order.
    """
    replicas = strategy.num_replicas_in_sync
    shards = cut or VirtualShards(replicas, replicas)
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    examples = source.examples("train") if source.in_memory and not on_tpu else None
    if examples is not None:
        batch_slice = BatchSlice(global_batch, seed, replicas=Replicas(shards.total * micro_batches))
        return Feed(lambda: (), lambda _next, step, part: train_batch(examples, step, part, batch_slice))
    whole = cut is None and micro_batches == 1

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = Replicas.from_context(context).numbers
        first, last = (shards.first(replica) for replica in (replicas.start, replicas.stop))
        parts = Replicas(shards.total, first, last - first)
        batch_slice = BatchSlice(global_batch, seed, first_step, replicas=parts)
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

    If another replica has one shard more, a replica's last part is repeated, because all must have the same shape.
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
    """Return the test split's batches, which the step of `Feed.batch` counts. Every pass must take all of them."""
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
