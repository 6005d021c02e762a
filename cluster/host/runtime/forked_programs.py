"""Programs that `up` runs as forks of a process with imports: both ends of the connection to that process.

`up` sends a command, its environment and the descriptor for its output, and receives the program's exit code.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from cluster.system import fork_server, processes
from cluster.system.errors import EXIT_FAILED

KILL = b"\2"
"""The byte, not a message, by which `up` requests that the program is killed."""
POLL_S = 0.01
KILL_S = 10.0
"""Timeout for a killed program to end."""


class ForkedProgram:
    """A program that the process on the other side has forked, see `user_code.Program`."""

    def __init__(self, connection: socket.socket, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._connection, self._command = connection, command
        self._code: int | None = None
        read, write = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(read, "rb")
        order = json.dumps({"command": command, "environment": dict(environment)}).encode() + b"\n"
        try:
            sent = socket.send_fds(connection, [order], [write])
            connection.sendall(order[sent:])
        finally:
            os.close(write)

    def wait(self, timeout_s: float) -> int:
        if self._code is None:
            self._connection.settimeout(timeout_s)
            try:
                self._code = receive_number(self._connection)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._command, timeout_s) from None
        return -signal.SIGKILL if self._code is None else self._code

    def kill(self) -> None:
        if self._code is None:
            try:
                self._connection.sendall(KILL)
                self.wait(KILL_S)
            except (OSError, subprocess.TimeoutExpired):
                self._connection.close()


def receive_number(connection: socket.socket) -> int | None:
    """Return the number that the other side sends; None if it has ended. Raises TimeoutError after a timeout."""
    with contextlib.suppress(ConnectionError, struct.error):
        number: int = struct.unpack("i", connection.recv(4))[0]
        return number
    return None


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message, with a received descriptor as `output`; raise SystemExit if the other side has ended."""
    text, files = b"", list[int]()
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(connection, 2**16, 1)
        if not part:
            raise SystemExit(EXIT_FAILED)
        text, files = (text + part).lstrip(KILL), files + more  # KILL may arrive after the program's end
    message: dict[str, Any] = json.loads(text)
    return message | ({"output": files[0]} if files else {})


def serve_calls(connection: socket.socket) -> None:
    """Run programs for `up`, one at a time, until a message without a command asks for the supervisor."""
    while "command" in (order := receive(connection)):
        with os.fdopen(order["output"], "wb") as output:
            how = {"env": order["environment"], "stdout": output, "stderr": subprocess.STDOUT, "process_group": 0}
            process = fork_server.start(order["command"], **how, preexec_fn=processes.die_with_parent)
        wanted = True
        while wanted and not processes.has_ended(process):
            ready, _, _ = select.select([connection], [], [], POLL_S)
            wanted = not ready
        killed = not wanted and connection.recv(len(KILL)) == KILL
        processes.signal_group(process, signal.SIGKILL)
        code = processes.wait(process)
        if not wanted and not killed:  # `up` has ended
            raise SystemExit(EXIT_FAILED)
        connection.sendall(struct.pack("i", code))
