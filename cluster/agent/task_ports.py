"""A task's port: waiting until it is free, and until TensorFlow's servers listen on those of other tasks."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

from cluster.contract.spec import Task
from cluster.system.errors import ClusterError, TimedOut

CONNECT_TIMEOUT_S = 2.0
POLL_S = 0.02
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of an HTTP/2 client: the preface and empty settings (RFC 9113, 3.4)."""
_HTTP2_SETTINGS = b"\4"
"""The type of the frame that an HTTP/2 server sends first, after its three bytes of length."""


class PortTaken(ClusterError):
    """Another program listens on the task's port."""


class Abandoned(ClusterError):
    """Waiting served no purpose any more: the run ended or a newer generation began."""


class Waiting(TypedDict):
    """How long a task waits, and its callbacks.

    Attributes:
        timeout_s: seconds to wait.
        abandon: called repeatedly; waiting ends when it returns true.
        report: called with the reason why this task cannot listen, and with an empty string once it can.
    """

    timeout_s: float
    abandon: Callable[[], bool]
    report: Callable[[str], None]


def listen(
    task: Task, *, timeout_s: float, abandon: Callable[[], bool], report: Callable[[str], None]
) -> socket.socket:
    """Listen on a task's address. Retries while the port is in use or the address is not available.

    The kernel frees the port of a killed program only with its memory, and a machine can be off its network for a
    while.

    Raises:
        PortTaken: another program used the port all the time.
        Abandoned: `abandon` returned true.
        TimedOut: the address was not available.
    """
    deadline, reported = time.monotonic() + timeout_s, ""
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # In a container the task's own name is its only interface; on one machine everything is on loopback.
            listener.bind((task.host, task.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            obstacle = _obstacle(task, error)
            if str(obstacle) != reported:
                report(reported := str(obstacle))
            if time.monotonic() > deadline or not _is_temporary(error):
                raise obstacle from error
            if abandon():
                raise Abandoned("waiting for the port was abandoned") from error
            time.sleep(POLL_S)
        else:
            if reported:
                report("")
            listener.settimeout(POLL_S * 5)
            return listener


def _is_temporary(error: OSError) -> bool:
    return isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def _obstacle(task: Task, error: OSError) -> ClusterError:
    """Return the error to raise if waiting does not help."""
    problem = f"{task.name} cannot listen on {task.address}: {error.strerror or error}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return TimedOut(f"{problem}; is this machine on the cluster's network?")
    port = f"ss -ltnp 'sport = :{task.port}'"
    return PortTaken(f"{problem}; end the program that holds port {task.port} ({port} shows it) and start again")


def await_servers(tasks: Sequence[Task], *, timeout_s: float, abandon: Callable[[], bool]) -> bool:
    """Wait until the TensorFlow servers of all these tasks listen; return False after the timeout or when abandoned.

    A gRPC client that connects a moment before its server listens waits for a second before it retries. The probe is
    HTTP/2, which the listener of the rendezvous, possibly still there, does not speak: it sends something else first.
    """
    deadline = time.monotonic() + timeout_s
    left = list(tasks)
    while left and not abandon() and time.monotonic() < deadline:
        left = [task for task in left if not _speaks_http2(task)]
        if left:
            time.sleep(POLL_S)
    return not left


def _speaks_http2(task: Task) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((task.host, task.port), CONNECT_TIMEOUT_S) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        server.sendall(_HTTP2_HELLO)
        return server.recv(4, socket.MSG_WAITALL)[3:] == _HTTP2_SETTINGS
    return False
