"""A debugger for the task that `up --debug` names."""

from __future__ import annotations

import os
import socket
import sys
import time
from importlib import import_module

from cluster.contract.run.folder import RunFolder

PORT_TIMEOUT_S = 30.0
"""Longest wait for the port, which the debug adapter of a previous attempt releases shortly after its end."""
POLL_S = 0.1


def wait_for_client(run: RunFolder, task: str) -> None:
    """Wait until a debugger is attached, if this is the task to debug."""
    if not (address := os.environ.get("DEBUGPY_LISTEN")):
        return
    if folder := os.environ.get("DEBUGPY_PACKAGES"):
        sys.path.append(folder)
    host, _, port = address.rpartition(":")
    debugpy = import_module("debugpy")  # only installed for debugging
    _await_port(host, int(port))
    debugpy.listen((host, int(port)))
    run.event(task, "waits for a debugger", cause=f"127.0.0.1:{port}")
    print(f"{task} waits for a debugger on 127.0.0.1:{port}", flush=True)
    debugpy.wait_for_client()


def _await_port(host: str, port: int) -> None:
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                time.sleep(POLL_S)
            else:
                return
