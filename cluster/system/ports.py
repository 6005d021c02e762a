"""Free ports of this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

from cluster.system.errors import PrerequisiteError

PORTS = range(20000, 32000)
"""Below the ports that Linux gives to outgoing connections, which could take a chosen one before its task does."""
BACKLOG = 1024
"""The most connections that wait to be accepted."""


def free_ports(count: int) -> tuple[int, ...]:
    """Return `count` ports of 127.0.0.1 on which nothing listens.

    Raises:
        PrerequisiteError: there are not that many.
    """
    # Two clusters that start at once look in different places.
    ports = tuple(itertools.islice(_unused("127.0.0.1", os.getpid() * 37), count))
    if len(ports) < count:
        raise PrerequisiteError(
            f"{count} free ports on 127.0.0.1 from {PORTS.start} to {PORTS.stop - 1}: found {len(ports)}; "
            "use fewer tasks or end what listens there"
        )
    return ports


def _unused(host: str, first: int) -> Iterator[int]:
    for offset in range(len(PORTS)):
        port = PORTS.start + (first + offset) % len(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            yield port


def bind_error(port: int) -> OSError | None:
    """Return why a server cannot listen on a port of 127.0.0.1; None if it can."""
    try:
        open_listener("127.0.0.1", port).close()
    except OSError as error:
        return error
    return None


def free_port(host: str, first: int) -> int:
    """Return a port of an address of this machine on which nothing listens.

    Args:
        host: the address.
        first: where to begin to look, so that several programs that look at once begin in different places.

    Raises:
        PrerequisiteError: there is none.
    """
    for port in _unused(host, first):
        return port
    raise PrerequisiteError(f"no port of {host} from {PORTS.start} to {PORTS.stop - 1} is free")


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
