"""`up --debug TASK`: one task waits for a debugger, and nothing takes its waiting for a failure."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import PrerequisiteError, UsageError
from cluster.options.request import OPTIONS, Request
from cluster.spec import ClusterSpec, parse_count

PORT = "5678"
"""As in .vscode/launch.json."""
VARIABLES = ("DEBUG_TASK", "DEBUG_PORT")
"""What the training program reads, see `train/startup/debugger.py`."""


def prepared(request: Request, cluster: ClusterSpec) -> Request:
    """Return a request whose task can be debugged: a local process that a debugger reaches, with time to think.

    Raises:
        UsageError: it names no such task, or what is requested besides keeps a debugger away.
        PrerequisiteError: debugpy or its port is missing.
    """
    if not request.debug:
        return request
    task, _, text = request.debug.partition(":")
    cluster.task(task)
    if request.detach:
        raise UsageError(f"--debug {task} with --detach, which waits until every task trains: leave one of them out")
    for name, needed in (("runtime", "local"), ("network", "host")):
        if (value := getattr(request, name)) not in ("", "auto", needed):
            raise UsageError(
                f"--debug {task} with --{name} {value}: a debugger reaches local processes on this machine's network; "
                f"use --{name} {needed}, or leave it out"
            )
    port = parse_count("debug", text or PORT, 1024, 65535)
    _check(port)
    env = (*request.env, f"DEBUG_TASK={task}", f"DEBUG_PORT={port}")
    patience = request.hang_timeout or str(OPTIONS["hang_timeout"].bounds[1])
    return replace(request, runtime="local", network="host", hang_timeout=patience, env=env)


def without(env: Sequence[str]) -> tuple[str, ...]:
    """Return a previous run's variables without those that made it wait: repeating it waits for nobody."""
    return tuple(each for each in env if each.partition("=")[0] not in VARIABLES)


def _check(port: int) -> None:
    if importlib.util.find_spec("debugpy") is None:
        raise PrerequisiteError("--debug needs debugpy: .venv/bin/python -m pip install debugpy")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PrerequisiteError(
                f"--debug: port 127.0.0.1:{port} is in use by another program ({error.strerror}); end it, or choose "
                "another one: --debug worker-0:5679"
            ) from error
