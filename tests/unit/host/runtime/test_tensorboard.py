"""TensorBoard's port: that of the running one, the usual one, or a free one; a taken port ends no run."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.host.control import watch
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.host.runtime import tensorboard
from cluster.system.errors import PrerequisiteError
from cluster.system.json_files import write_json
from tests.support.launching import no_shell


@pytest.fixture
def runs_dir(tmp_path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """The ports on which TensorBoard was started; this process stands in for it."""
    ports: list[int] = []

    def start(runs_dir: Path, port: int) -> int:
        ports.append(port)
        return os.getpid()

    monkeypatch.setattr(tensorboard, "_start_process", start)
    monkeypatch.setattr(tensorboard, "_await_answer", lambda *_: None)
    return ports


@pytest.fixture
def usual(monkeypatch) -> int:
    """A free port in the place of the usual one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    monkeypatch.setattr(tensorboard, "PORT", port)
    return port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def start(runs_dir: Path, port: int | None = None, preferred: int | None = None) -> int:
    return tensorboard.start(runs_dir, port, tensorboard.PROCESS, no_shell, preferred=preferred)


def test_the_usual_port_is_used_if_it_is_free(runs_dir, started, usual):
    assert [usual] == [start(runs_dir)] == started == [tensorboard.running(runs_dir)]


def test_a_free_port_is_used_if_the_usual_one_is_taken(runs_dir, started, usual):
    with socket.create_server(("127.0.0.1", usual)):
        port = start(runs_dir)
    assert port != usual
    assert [port] == started == [tensorboard.running(runs_dir)]


def test_our_own_is_used_wherever_it_runs(runs_dir, started, usual, taken):
    first = start(runs_dir, preferred=usual)
    assert [first] * 3 == [start(runs_dir), start(runs_dir, first), start(runs_dir, preferred=taken)]
    assert [first] == started


def test_the_port_that_a_run_had_comes_first(runs_dir, started, usual):
    with socket.create_server(("127.0.0.1", 0)) as server:
        earlier = server.getsockname()[1]
    assert earlier == start(runs_dir, preferred=earlier)


def test_the_usual_port_is_next_if_another_program_has_the_earlier_one(runs_dir, started, usual, taken):
    assert usual == start(runs_dir, preferred=taken)


def test_a_taken_port_that_was_named_is_refused_and_our_own_stays(runs_dir, started, usual, taken):
    start(runs_dir)
    with pytest.raises(PrerequisiteError, match=str(taken)):
        start(runs_dir, taken)
    assert usual == tensorboard.running(runs_dir)


def test_a_run_gets_another_port_than_the_taken_one_that_was_named(make_run, started, usual, taken):
    run = make_run()
    line = watch._start_tensorboard(run, taken, tensorboard.PROCESS, no_shell)
    assert f"http://127.0.0.1:{usual}" in line
    assert str(taken) in line
    assert usual == run.board_port


@pytest.mark.parametrize(
    ("recorded", "requested", "expected"),
    [
        (0, "", 0),
        (0, "auto", None),
        (0, "6010", 6010),
        (6010, "", None),
        (6010, "0", 0),
        (2**16, "", None),
        ("x", "", None),
    ],
)
def test_a_resumed_run_does_without_tensorboard_if_it_did_before(resolved, make_run, recorded, requested, expected):
    run = make_run(workers=0)
    write_json(run.summary, {"state": "stopped"})
    write_json(run.board, {"port": recorded})
    plan = planning.plan(Request(resume=run.name, runtime="local", tensorboard_port=requested))
    assert expected == plan.tensorboard_port
