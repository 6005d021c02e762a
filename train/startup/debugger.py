"""A debugger for one task, which `up --debug` names."""

from __future__ import annotations

import os
from importlib import import_module


def wait_for_client(task: str) -> None:
    """Wait until a debugger is attached, if this is the task to debug."""
    if os.environ.get("DEBUG_TASK") != task:
        return
    debugpy = import_module("debugpy")  # nobody else needs it to be installed
    port = int(os.environ["DEBUG_PORT"])
    debugpy.listen(("127.0.0.1", port))
    print(f"{task} waits for a debugger on 127.0.0.1:{port}", flush=True)
    debugpy.wait_for_client()
