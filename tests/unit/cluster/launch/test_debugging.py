"""`up --debug TASK`: what makes a task wait for a debugger, and that nothing but its waiting is remembered."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from cluster import spec
from cluster.errors import PrerequisiteError, UsageError
from cluster.launch import debugging
from cluster.options.request import Request

CLUSTER = spec.build(workers=1)


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> str:
    """debugpy is here, and a port of its own."""
    monkeypatch.setattr(debugging.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_task_to_debug_is_a_local_process_with_time(free_port: str) -> None:
    request = debugging.prepared(Request(debug=f"worker-0:{free_port}", env=("A=1",)), CLUSTER)
    assert ("local", "host") == (request.runtime, request.network)
    assert request.number("hang_timeout") > 3600
    assert ("A=1", "DEBUG_TASK=worker-0", f"DEBUG_PORT={free_port}") == request.env


def test_a_request_without_a_task_to_debug_is_as_it_was() -> None:
    request = Request(workers="1")
    assert request is debugging.prepared(request, CLUSTER)


@pytest.mark.parametrize(
    "options",
    [
        {"debug": "worker-7"},
        {"debug": "worker-0", "detach": True},
        {"debug": "worker-0", "runtime": "docker"},
        {"debug": "worker-0", "network": "private"},
        {"debug": "worker-0:80"},
        {"debug": "worker-0:x"},
    ],
)
def test_what_keeps_a_debugger_away_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        debugging.prepared(Request(**options), CLUSTER)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PrerequisiteError, match="in use"):
        debugging.prepared(Request(debug=f"chief:{taken.getsockname()[1]}"), CLUSTER)


def test_without_debugpy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, free_port: str) -> None:
    monkeypatch.setattr(debugging.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrerequisiteError, match="pip install debugpy"):
        debugging.prepared(Request(debug=f"chief:{free_port}"), CLUSTER)


def test_a_run_that_is_repeated_waits_for_nobody() -> None:
    assert ("A=1", "B") == debugging.without(["A=1", "DEBUG_TASK=chief", "B", "DEBUG_PORT=5678"])
