"""How far a task has come, compared with the other tasks, for its heartbeat.

Inside a graph the position is written to a variable, which the heartbeat thread reads. That takes a few microseconds,
and no computation waits for it, so the weights keep their bits. On a GPU an operation ends before its computation, and
a TPU has no such variables: there and in Keras's `fit`, a whole call counts as one exchange.
"""

import contextlib
import time
from typing import Any

import tensorflow as tf

from cluster.contract.run.records import Place, Position


class Positions:
    """Where this task is, as a number that grows with each place that it enters or leaves."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._in_graph = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._in_python, self._seen, self._since = 0, 0, time.monotonic()

    def clear(self) -> None:
        self._in_python = 0
        self._in_graph.assign(0)

    def set(self, place: Place, step: Any, after: Any = (), *, left: bool = False) -> None:
        """Record that this task enters or has left a place of a step; in a graph, int64, once `after` is computed."""
        number = 2 * (len(Place) * step + [*Place].index(place)) + left
        if not tf.is_tensor(number):
            self._in_python = number
            return
        tensors = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
        with tf.device("CPU:0"), tf.control_dependencies(tensors):
            tf.raw_ops.AssignVariableOp(resource=self._in_graph.handle, value=tf.identity(number))

    def current(self) -> Position:
        newest = self._in_python
        with contextlib.suppress(tf.errors.OpError):  # after the cluster has failed
            newest = max(newest, int(self._in_graph.numpy()))
        if newest != self._seen:
            self._seen, self._since = newest, time.monotonic()
        step, place = divmod(newest // 2, len(Place))
        return Position(place=[*Place][place], step=step, left=newest % 2 == 1, seconds=time.monotonic() - self._since)
