"""How stages exchange tensors: by collective operations between tasks, or directly within one process.

A broadcast in a group of two is a send and a receive inside the graph. Each edge and direction has a group key, and
each micro-batch an instance key, which every step reuses. A key has one shape; TensorFlow aborts if it changes.

Tasks of R pipelines with S stages each: task r * S + s is stage s of pipeline r.
"""

from dataclasses import dataclass

import tensorflow as tf

VALUES, GRADIENTS, EVALUATED = range(3)
"""Tensors that cross an edge: activations and gradients in training; activations in evaluation."""
DIRECTIONS = 3
NORM, FLAG = 0, 1
"""Tensors that all stages add up: the norms of gradients, and the number of stages with a gradient that is not finite.
The sums may run concurrently."""
MOST_STAGES = 1_000
MOST_SHARED = 10_000
EDGE_KEYS, STAGE_KEYS, SUM_KEYS, SHARED_KEYS = 1_000_000, 20_000_000, 30_000_000, 40_000_000
"""First group keys: of the edges of all pipelines; of each pipeline's stages; of the equal stages of all pipelines; of
the stages that share a variable. tf.distribute counts from 0, and each group has separate instance keys."""
TIMEOUT_S = 0.0
"""0 for no timeout: a neighbour may take long to compile, and a closed connection reveals its loss."""


@dataclass(frozen=True)
class TaskEdges:
    """Edges between the tasks of a pipeline, each with one stage."""

    pipeline: int = 0

    def send(self, tensor: tf.Tensor, direction: int, stage: int, micro_batch: int) -> list[tf.Operation]:
        """Send a tensor of stage `stage`; return the operations for which a step must wait."""
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
        """Return the keys of a transfer over an edge, whose number is that of the stage before it."""
        return _keys(2, EDGE_KEYS + DIRECTIONS * (MOST_STAGES * self.pipeline + edge) + direction, micro_batch)


class LocalEdges:
    """Edges between the stages of one process, where TensorFlow copies between devices."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, int], tf.Tensor] = {}

    def send(self, tensor: tf.Tensor, direction: int, stage: int, micro_batch: int) -> list[tf.Operation]:
        self._sent[direction, stage + (-1 if direction == GRADIENTS else 1), micro_batch] = tensor
        return []

    def receive(self, spec: tf.TensorSpec, direction: int, stage: int, micro_batch: int) -> tf.Tensor:
        return tf.ensure_shape(tf.identity(self._sent.pop((direction, stage, micro_batch))), spec.shape)


Edges = TaskEdges | LocalEdges


def add_up(tensor: tf.Tensor, size: int, group: int, instance: int = 0) -> tf.Tensor:
    """Add up a tensor over the `size` stages of a group, each of which calls it with the same shape.

    The order is that of TensorFlow's ring, which depends only on the shape and the number of stages.
    """
    with tf.device("CPU:0"):
        result = tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
            **_keys(size, group, instance),
        )
    return tf.ensure_shape(result, tensor.shape)


def _keys(size: int, group: int, instance: int) -> dict[str, float]:
    return {"group_size": size, "group_key": group, "instance_key": instance, "timeout_seconds": TIMEOUT_S}


def _carrier(dtype: tf.DType) -> tf.DType:
    """Return the type in which tensors are transferred: TensorFlow cannot broadcast bfloat16."""
    return tf.float16 if dtype == tf.bfloat16 else dtype
