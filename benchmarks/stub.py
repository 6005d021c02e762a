"""A training program without training: it passes the gate, writes heartbeats and ends on request.

Its tasks cost next to nothing, so that measurements of a large cluster are those of its agents. Like the trainer it is
imported once, by the supervisor (`load`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.system.errors import EXIT_PEER_LOST

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""The first frame of an HTTP/2 server (RFC 9113, 3.4), by which agents recognize TensorFlow's."""


def load(_config: dict[str, Any], _strategy: str) -> None:
    """Import what the tasks need, which this module has done."""


def main() -> None:
    """Run as the program of the task that the environment names."""
    run = RunFolder(Path(os.environ["RUN_DIR"]))
    requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: requested.set())
    task = run.load_cluster().task(os.environ["TASK"])
    with os.fdopen(int(os.environ["GATE_FD"]), "rb") as gate:
        if not gate.readline():
            sys.exit(EXIT_PEER_LOST)
    heartbeat = HeartbeatWriter(run, task, int(os.environ["GENERATION"]))
    heartbeat.update(state="training")
    heartbeat.start()
    if task.name == "chief":
        threading.Thread(target=_answer, args=(task.host, task.port), daemon=True).start()
    requested.wait()
    heartbeat.update(state="stopped")
    heartbeat.stop()


def _answer(host: str, port: int) -> None:
    with socket.create_server((host, port), backlog=1024) as server:
        while True:
            caller, _ = server.accept()
            with caller, contextlib.suppress(OSError):  # the caller did not wait for the answer
                caller.sendall(SETTINGS)


if __name__ == "__main__":
    main()
