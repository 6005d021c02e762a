"""A minimal client of the Debug Adapter Protocol, and a free port for it."""

import json
import socket
from typing import Any


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Client:
    """Attaches to a task that waits."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._stream = self._connection.makefile("rwb")
        self._number = 0

    def attach(self) -> None:
        """Attach; the task stays where it is."""
        self.request("initialize", adapterID="test")
        self.until("response", "initialize")
        self.request("attach", justMyCode=False)
        self.until("event", "initialized")

    def request(self, command: str, **arguments: Any) -> None:
        self._number += 1
        value = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(value).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()

    def until(self, kind: str, name: str) -> dict[str, Any]:
        """Return the next message of this kind and name."""
        while True:
            length = int(self._stream.readline().partition(b":")[2])
            self._stream.readline()
            message: dict[str, Any] = json.loads(self._stream.read(length))
            if message["type"] == kind and name in (message.get("event"), message.get("command")):
                return message

    def close(self) -> None:
        self._stream.close()
        self._connection.close()
