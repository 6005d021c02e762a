"""Tests, while a task waits for long, whether it can reach its neighbours: a dead link leaves every task waiting.

Where only the program has ended, the system refuses a connection at once; where it is frozen, the system accepts it. So
a connection that is not opened in time means that the network loses packets, in at least one direction.
"""

import contextlib
import errno
import socket
import threading
from dataclasses import replace

from cluster.contract.results.late_tasks import WAIT_S
from cluster.contract.run.records import Position
from cluster.contract.spec import ClusterSpec, Task

NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
CONNECT_S = 2.5
"""Longer than the second after which the system repeats a lost packet."""


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
