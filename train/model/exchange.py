"""Sums over the replicas, with as few messages as possible.

Two tasks with one CPU replica each exchange their tensors and add them up. That takes one message each way, where a
ring of two takes two, the second of which must wait for the first. In floating point a + b is b + a, so the bits are
those of the ring. All other replicas use the strategy's reduction.

Shapes: N numbers of all tensors together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

LARGEST_SWAP = 2**26
"""Bytes: above this, transfer takes longer than latency, and the ring transfers less."""


def add_up(tensors: Sequence[Any]) -> list[Any]:
    """Add up tensors or `tf.IndexedSlices` over all replicas. Every replica calls it with the same shapes."""
    replica = tf.distribute.get_replica_context()
    if not tensors or replica.num_replicas_in_sync == 1:
        return list(tensors)
    gather = _gather_of_two(replica.strategy)
    if gather is None or not _can_be_one_message(tensors):
        return replica.all_reduce("SUM", list(tensors))
    local_N = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    both_2N = tf.ensure_shape(gather(local_N[tf.newaxis]), [2, *local_N.shape])
    parts = tf.split(both_2N[0] + both_2N[1], [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _gather_of_two(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Return a function that gathers a tensor `[1, N]` of each of two tasks as `[2, N]`; None for other clusters."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or strategy.num_replicas_in_sync != 2:
        return None
    if len(devices := strategy.extended.worker_devices) != 1 or "CPU" not in devices[0]:
        return None
    # The public `all_gather` first exchanges the shapes, which takes another message.
    (launcher,) = strategy.extended._cross_device_ops._launchers
    return lambda local_1N: launcher._all_gather(local_1N, None)


def _can_be_one_message(tensors: Sequence[Any]) -> bool:
    if any(isinstance(tensor, tf.IndexedSlices) or not tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    numbers = sum(tensor.shape.num_elements() for tensor in tensors)
    return len({tensor.dtype for tensor in tensors}) == 1 and numbers * tensors[0].dtype.size <= LARGEST_SWAP
