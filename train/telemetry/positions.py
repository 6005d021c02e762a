"""How far a task has come, compared with the other tasks, for its heartbeat.

Inside a graph the position is written to a variable, which the heartbeat thread reads. That takes a few microseconds,
and no computation waits for it, so the weights keep their bits. On a GPU an operation ends before its computation, and
a TPU has no such variables: there and in Keras's `fit`, a whole call counts as one exchange.

While a task waits for long, it tests whether it can reach its neighbours: a dead link leaves every task waiting. Where
only the program has ended, the system refuses a connection at once; where it is frozen, the system accepts it. So a
connection that is not opened in time means that the network loses packets, in at least one direction.
"""

import contextlib
import errno
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import tensorflow as tf

from cluster.contract.results.late_tasks import WAIT_S
from cluster.contract.run.records import Place, Position
from cluster.contract.spec import ClusterSpec, Task

NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
CONNECT_S = 2.5
"""Longer than the second after which the system repeats a lost packet."""


class Positions:
    """Where this task is, as a number that grows with each place that it enters or leaves."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._in_graph = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._batch = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._in_python, self._seen, self._since = 0, 0, time.monotonic()

    def clear(self) -> None:
        self._in_python = 0
        self._in_graph.assign(0)

    def set(self, place: Place, step: Any, after: Any = (), *, left: bool = False) -> None:
        """Record that this task enters or has left a place of a step; in a graph, int64, once `after` is computed."""
        number = 2 * (len(Place) * step + [*Place].index(place)) + left
        if tf.is_tensor(number):
            _assign(self._in_graph, number, after)
        else:
            self._in_python = number

    def set_batch(self, batch: tf.Tensor, after: Any) -> None:
        """Record, in a graph, how many batches this task has evaluated, int64, once `after` is computed."""
        _assign(self._batch, batch, after)

    def current(self) -> Position:
        newest, batch = self._in_python, 0
        with contextlib.suppress(tf.errors.OpError):  # after the cluster has failed
            newest, batch = max(newest, int(self._in_graph.numpy())), int(self._batch.numpy())
        if newest != self._seen:
            self._seen, self._since = newest, time.monotonic()
        step, place = divmod(newest // 2, len(Place))
        seconds = time.monotonic() - self._since
        return Position(place=[*Place][place], step=step, left=newest % 2 == 1, seconds=seconds, batch=batch)


class Links:
    """The network from a task to its neighbours in the ring of the collectives, and to the chief."""

    def __init__(self, spec: ClusterSpec, task: Task) -> None:
        names = [member.name for member in spec.members]
        place = names.index(task.name) if task.name in names else None
        around = () if place is None else {names[0], names[place - 1], names[(place + 1) % len(names)]} - {task.name}
        self._neighbours = [member for member in spec.members if member.name in around]
        self._dead = dict.fromkeys(around, False)
        self._threads: dict[str, threading.Thread] = {}

    def examine(self, position: Position) -> Position:
        """Return the position with the neighbours that the tests in the background, while it waits, did not reach."""
        waits = not position.left and position.seconds >= WAIT_S
        for task in self._neighbours:
            if not waits:
                self._dead[task.name] = False
            elif task.name not in self._threads or not self._threads[task.name].is_alive():
                thread = threading.Thread(target=self._test, args=(task,), name=f"link to {task.name}", daemon=True)
                self._threads[task.name] = thread
                with contextlib.suppress(RuntimeError):  # no further thread can start
                    thread.start()
        return replace(position, unreachable=tuple(name for name, dead in self._dead.items() if dead))

    def _test(self, task: Task) -> None:
        dead = False
        try:
            socket.create_connection((task.host, task.port), CONNECT_S).close()
        except (TimeoutError, socket.gaierror):  # a name is unknown once its container has left the network
            dead = True
        except OSError as error:  # others, such as a refusal, show that packets arrive, or are this task's problem
            dead = error.errno in NO_ROUTE
        self._dead[task.name] = dead


def _assign(variable: tf.Variable, value: tf.Tensor, after: Any) -> None:
    tensors = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
    with tf.device("CPU:0"), tf.control_dependencies(tensors):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.identity(value))
