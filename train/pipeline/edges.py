"""How stages exchange tensors: as collective operations between two tasks, or as they are within one process.

A broadcast in a group of two is a send and a receive inside the graph. Each edge, direction and micro-batch has an
instance key of its own, reused at every step: a key stands for one shape for ever, and TensorFlow aborts on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

FIRST_GROUP = 7_000
"""Group keys from here on are ours; tf.distribute counts its own from 0."""
FIRST_INSTANCE = 1_000_000
VALUES, GRADIENTS = 0, 1
"""Directions: to the next stage, and back."""
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


def broadcast(tensors: list[tf.Tensor], owner: int, task: int, tasks: int) -> list[tf.Tensor]:
    """Return on every task what the owner's tensors hold; all tasks call it in the same order, with the same shapes.

    Args:
        tensors: of the owner; of others, of the same shapes and types.
        owner: the task whose tensors they become.
        task: this one's number.
        tasks: of the cluster.
    """
    results = []
    for number, tensor in enumerate(tensors):
        keys = {"group_size": tasks, "group_key": FIRST_GROUP - 1 - owner}
        keys["instance_key"] = FIRST_INSTANCE // 2 + 10_000 * owner + number
        with tf.device("CPU:0"):
            if task == owner:
                sent = tf.raw_ops.CollectiveBcastSendV2(input=tensor, timeout_seconds=TIMEOUT_S, **keys)
            else:
                sent = tf.raw_ops.CollectiveBcastRecvV2(
                    shape=tensor.shape.as_list(), T=tensor.dtype, timeout_seconds=TIMEOUT_S, **keys
                )
        results.append(sent)
    return results
