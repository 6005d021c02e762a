"""Free ports of this machine."""

import contextlib
import os
import socket

from cluster.system.errors import PrerequisiteError
from cluster.system.messages import counted

PORTS = range(20000, 32000)
"""The range for tasks, below Linux's ephemeral ports: an outgoing connection could take one of these first."""
BACKLOG = 1024
"""Limit of connections that wait to be accepted."""


def free_ports(count: int, host: str = "127.0.0.1", first: int | None = None) -> tuple[int, ...]:
    """Return free ports of an address of this machine; raise PrerequisiteError if there are too few.

    The search begins at the offset `first`, by default derived from the process id, so that concurrent searches differ.
    """
    start = os.getpid() * 37 if first is None else first
    ports: list[int] = []
    for offset in range(len(PORTS)):
        if len(ports) == count:
            break
        port = PORTS.start + (start + offset) % len(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports.append(port)
    if len(ports) < count:
        wanted = f"{counted(count, 'free port')} on {host} from {PORTS.start} to {PORTS.stop - 1}"
        raise PrerequisiteError(f"{wanted}: found {len(ports)}; use fewer tasks or end what listens there")
    return tuple(ports)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; raise OSError if it is in use or not an address of this machine."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
