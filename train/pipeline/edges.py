"""How stages exchange tensors: as collective operations between tasks, or as they are within one process.

A broadcast in a group of two is a send and a receive inside the graph. Each edge and direction has a group key, and
each micro-batch an instance key in it, reused at every step: it stands for one shape for ever, and TensorFlow aborts on
another.

Tasks of R pipelines with S stages each: task r * S + s is stage s of pipeline r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

VALUES, GRADIENTS, EVALUATED, SHOWN = range(4)
"""What crosses an edge: while training to the next stage and back; to the next stage, to evaluate and to predict."""
DIRECTIONS = 4
NORM, FLAG = 0, 1
"""What all stages share: the norms of gradients, and whether they are finite."""
MOST_STAGES = 1_000
MOST_SHARED = 10_000
EDGE_KEYS, NORM_KEYS, SUM_KEYS, SHARED_KEYS = 1_000_000, 20_000_000, 30_000_000, 40_000_000
"""Group keys from here on are ours; tf.distribute counts its own from 0. A group has instance keys of its own."""
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
        keys = self._keys(direction, stage - 1 if direction == GRADIENTS else stage, micro_batch)
        carried = _carrier(tensor.dtype)
        with tf.device("CPU:0"):
            tensor = tensor if carried == tensor.dtype else tf.bitcast(tensor, carried)
            return [tf.raw_ops.CollectiveBcastSendV2(input=tensor, **keys).op]

    def receive(self, spec: tf.TensorSpec, direction: int, stage: int, micro_batch: int) -> tf.Tensor:
        keys = self._keys(direction, stage if direction == GRADIENTS else stage - 1, micro_batch)
        carried = _carrier(spec.dtype)
        with tf.device("CPU:0"):
            received = tf.raw_ops.CollectiveBcastRecvV2(shape=spec.shape.as_list(), T=carried, **keys)
            received = received if carried == spec.dtype else tf.bitcast(received, spec.dtype)
        return tf.ensure_shape(received, spec.shape)

    def _keys(self, direction: int, edge: int, micro_batch: int) -> dict[str, float]:
        """Return the keys of what crosses an edge, numbered by the stage before it."""
        place = DIRECTIONS * (MOST_STAGES * self.pipeline + edge) + direction
        return _keys(2, EDGE_KEYS + place, micro_batch)


class LocalEdges:
    """Edges between the stages of one process: TensorFlow copies between devices by itself."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, int], tf.Tensor] = {}

    def send(self, tensor: tf.Tensor, direction: int, stage: int, micro_batch: int) -> list[tf.Operation]:
        self._sent[direction, stage + (-1 if direction == GRADIENTS else 1), micro_batch] = tensor
        return []

    def receive(self, spec: tf.TensorSpec, direction: int, stage: int, micro_batch: int) -> tf.Tensor:
        return tf.ensure_shape(tf.identity(self._sent.pop((direction, stage, micro_batch))), spec.shape)


def broadcast(
    own: tf.Tensor | None, spec: tf.TensorSpec, owner: int, stages: int, pipeline: int, what: int
) -> tf.Tensor:
    """Return on every stage of a pipeline what one of them has; all of them call it with the same spec.

    Args:
        own: of the owner; None on the others.
        spec: of the tensor.
        owner: the stage that has it.
        stages: of the pipeline.
        pipeline: its number.
        what: `NORM` or `FLAG`: both may be under way at the same time.
    """
    keys = _keys(stages, NORM_KEYS + MOST_STAGES * pipeline + owner, what)
    with tf.device("CPU:0"):
        if own is not None:
            result = tf.raw_ops.CollectiveBcastSendV2(input=own, **keys)
        else:
            shape = tf.constant(spec.shape.as_list(), tf.int32)
            result = tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=spec.dtype, **keys)
    return tf.ensure_shape(result, spec.shape)


def sum_over_pipelines(tensors: Sequence[tf.Tensor], stage: int, pipelines: int) -> list[tf.Tensor]:
    """Return the sums over the equal stages of all pipelines; each of them calls it with tensors of the same shapes.

    The order is that of TensorFlow's ring, which follows from the shapes and the number of pipelines alone.
    """
    return [_sum(tensor, _keys(pipelines, SUM_KEYS + stage, number)) for number, tensor in enumerate(tensors)]


def sum_over_stages(tensor: tf.Tensor, variable: int, users: int, pipeline: int) -> tf.Tensor:
    """Return the sum over the stages of a pipeline that use a variable; each of them calls it.

    Args:
        tensor: what this stage has.
        variable: its number among those that stages share.
        users: how many stages use it.
        pipeline: its number.
    """
    return _sum(tensor, _keys(users, SHARED_KEYS + MOST_SHARED * pipeline + variable, 0))


def _sum(tensor: tf.Tensor, keys: dict[str, float]) -> tf.Tensor:
    with tf.device("CPU:0"):
        result = tf.raw_ops.CollectiveReduceV2(
            input=tensor, ordering_token=[], merge_op="Add", final_op="Id", communication_hint="ring", **keys
        )
    return tf.ensure_shape(result, tensor.shape)


def _keys(size: int, group: int, instance: int) -> dict[str, float]:
    return {"group_size": size, "group_key": group, "instance_key": instance, "timeout_seconds": TIMEOUT_S}


def _carrier(dtype: tf.DType) -> tf.DType:
    """Return the type as which tensors travel: TensorFlow broadcasts no bfloat16."""
    return tf.float16 if dtype == tf.bfloat16 else dtype
