"""A task that waits for a debugger goes on once one is attached; all others go on at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from cluster.paths import ROOT
from train.startup import debugger

PROGRAM = "from train.startup import debugger; debugger.wait_for_client('worker-0'); print('it goes on')"


class Client:
    """The least that a debugger says, in the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.stream = self.connection.makefile("rwb")

    def request(self, number: int, command: str, **arguments: Any) -> None:
        body = json.dumps({"seq": number, "type": "request", "command": command, "arguments": arguments}).encode()
        self.stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.stream.flush()

    def until(self, kind: str, name: str) -> None:
        while True:
            length = int(self.stream.readline().partition(b":")[2])
            self.stream.readline()
            message = json.loads(self.stream.read(length))
            if message["type"] == kind and name in (message.get("event"), message.get("command")):
                return


def test_a_task_waits_until_a_debugger_is_attached() -> None:
    pytest.importorskip("debugpy", reason="debugpy is installed by whoever debugs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"DEBUG_TASK": "worker-0", "DEBUG_PORT": str(port)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert f"worker-0 waits for a debugger on 127.0.0.1:{port}\n" == process.stdout.readline()
            client = Client(port)
            client.request(1, "initialize", adapterID="test")
            client.until("response", "initialize")
            client.request(2, "attach", justMyCode=False)
            client.until("event", "initialized")
            assert process.poll() is None
            client.request(3, "configurationDone")
            assert "it goes on\n" == process.stdout.readline()
            client.connection.close()
            assert 0 == process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize("variables", [{}, {"DEBUG_TASK": "worker-1", "DEBUG_PORT": "1"}])
def test_other_tasks_go_on_at_once(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    debugger.wait_for_client("worker-0")
