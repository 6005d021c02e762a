"""How stages exchange tensors: as collective operations between two tasks, or as they are within one process.

A broadcast in a group of two is a send and a receive inside the graph. Each edge, direction and micro-batch has an
instance key of its own, reused at every step: a key stands for one shape for ever, and TensorFlow aborts on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

FIRST_GROUP = 7_000
"""Group keys from here on are ours; tf.distribute counts its own from 0."""
FIRST_INSTANCE = 1_000_000
VALUES, GRADIENTS = 0, 1
"""Directions: to the next stage, and back."""
NORMS, STATE = 0, 1
"""What all stages share: the norms of gradients, and all that they train."""
TIMEOUT_S = 0.0
"""None: a neighbour may compile for long, and one that is lost is noticed by its closed connection."""


class Edges(Protocol):
    """What carries tensors between neighbouring stages."""

    def send(self, tensor: tf.Tensor, direction: int, stage: int, micro_batch: int) -> list[tf.Operation]:
        """Send what stage `stage` computed; return the operations that a step must wait for."""

    def receive(self, spec: tf.TensorSpec, direction: int, stage: int, micro_batch: int) -> tf.Tensor:
        """Return what a neighbour sent to stage `stage`."""


@dataclass(frozen=True)
class TaskEdges:
    """Edges between tasks, one for each stage, that have formed a cluster.

    Attributes:
        pipeline: number of the pipeline that the stages belong to.
    """

    pipeline: int = 0

    def send(self, tensor: tf.Tensor, direction: int, stage: int, micro_batch: int) -> list[tf.Operation]:
        group, instance = self._keys(direction, stage if direction == VALUES else stage - 1, micro_batch)
        with tf.device("CPU:0"):
            sent = tf.raw_ops.CollectiveBcastSendV2(
                input=tensor, group_size=2, group_key=group, instance_key=instance, timeout_seconds=TIMEOUT_S
            )
        return [sent.op]

    def receive(self, spec: tf.TensorSpec, direction: int, stage: int, micro_batch: int) -> tf.Tensor:
        group, instance = self._keys(direction, stage - 1 if direction == VALUES else stage, micro_batch)
        with tf.device("CPU:0"):
            received = tf.raw_ops.CollectiveBcastRecvV2(
                group_size=2,
                group_key=group,
                instance_key=instance,
                shape=spec.shape.as_list(),
                T=spec.dtype,
                timeout_seconds=TIMEOUT_S,
            )
        return tf.ensure_shape(received, spec.shape)

    def _keys(self, direction: int, edge: int, micro_batch: int) -> tuple[int, int]:
        """Return the group key and the instance key of what crosses an edge, numbered by the stage before it."""
        place = 2 * (1_000 * self.pipeline + edge) + direction
        return FIRST_GROUP + place, FIRST_INSTANCE + 10_000 * place + micro_batch


class LocalEdges:
    """Edges between the stages of one process: TensorFlow copies between devices by itself."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, int], tf.Tensor] = {}

    def send(self, tensor: tf.Tensor, direction: int, stage: int, micro_batch: int) -> list[tf.Operation]:
        self._sent[direction, stage + (1 if direction == VALUES else -1), micro_batch] = tensor
        return []

    def receive(self, spec: tf.TensorSpec, direction: int, stage: int, micro_batch: int) -> tf.Tensor:
        return tf.ensure_shape(tf.identity(self._sent.pop((direction, stage, micro_batch))), spec.shape)


def broadcast(
    own: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec], owner: int, task: int, tasks: int, what: int
) -> list[tf.Tensor]:
    """Return on every task what the owner has; all tasks call it with the same specs.

    Args:
        own: of the owner; not used on other tasks.
        specs: of each tensor.
        owner: the task that has them.
        task: this one's number.
        tasks: of the cluster.
        what: `NORMS` or `STATE`: shares that may be under way at the same time.
    """
    group, first = FIRST_GROUP - 1 - 2 * owner - what, 10_000 * (2 * owner + what)
    results = []
    for number, spec in enumerate(specs):
        keys = {"group_size": tasks, "group_key": group, "instance_key": first + number + FIRST_INSTANCE // 10}
        with tf.device("CPU:0"):
            if task == owner:
                result = tf.raw_ops.CollectiveBcastSendV2(input=own[number], timeout_seconds=TIMEOUT_S, **keys)
            else:
                shape = tf.constant(spec.shape.as_list(), tf.int32)
                result = tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=spec.dtype, timeout_seconds=TIMEOUT_S, **keys)
        results.append(tf.ensure_shape(result, spec.shape))
    return results
