"""TensorBoard's port (the running one's, the usual or a free one; a taken port ends no run), and its pinned cards."""

import contextlib
import io
import json
import os
import runpy
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import pytest
from tensorboard.backend.application import TensorBoardWSGI
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from cluster.host.control import foreground
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.host.runtime import tensorboard
from cluster.system.errors import PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from cluster.system.ports import free_ports
from tests.support.launching import no_shell


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
    (port,) = free_ports(1)
    monkeypatch.setattr(tensorboard, "PORT", port)
    return port


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def start(runs_dir: Path, port: int | None = None, preferred: int | None = None) -> int:
    return tensorboard.start(runs_dir, port, tensorboard.PROCESS, no_shell, preferred=preferred)


@pytest.mark.parametrize(
    ("preferred", "usual_is_taken", "expected"),
    [
        (None, False, "usual"),
        (None, True, "another"),
        ("free", False, "free"),  # which the run had before
        ("taken", False, "usual"),
    ],
)
def test_a_port_is_chosen(tmp_path, started, usual, taken, preferred, usual_is_taken, expected):
    wanted = {"free": free_ports(2)[1], "taken": taken}.get(preferred)
    with socket.create_server(("127.0.0.1", usual)) if usual_is_taken else contextlib.nullcontext():
        port = start(tmp_path, preferred=wanted)
    assert [port] == started == [tensorboard.running_port(tmp_path)]
    assert expected == {usual: "usual", wanted: preferred}.get(port, "another")


def test_our_own_is_used_wherever_it_runs_and_stays_where_a_taken_port_is_refused(tmp_path, started, usual, taken):
    first = start(tmp_path, preferred=usual)
    assert [first] * 3 == [start(tmp_path), start(tmp_path, first), start(tmp_path, preferred=taken)]
    with pytest.raises(PrerequisiteError, match=str(taken)):
        start(tmp_path, taken)
    assert [usual] == started == [tensorboard.running_port(tmp_path)]


def test_a_run_gets_another_port_than_the_taken_one_that_was_named(make_run, started, usual, taken):
    run = make_run()
    line = foreground._start_tensorboard(run, taken, tensorboard.PROCESS, no_shell, lambda value: None)
    assert f"http://127.0.0.1:{usual}" in line
    assert str(taken) in line
    assert usual == run.board_port


def test_no_proxy_is_asked_whether_it_is_up(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = b"HTTP/1.0 200 OK\r\n\r\n"
        threading.Thread(target=lambda: server.accept()[0].sendall(answer), daemon=True).start()
        tensorboard._await_answer(tmp_path, server.getsockname()[1], None, lambda: pytest.fail("no answer"))


def test_a_run_continues_without_a_tensorboard_that_does_not_start(make_run, monkeypatch):
    monkeypatch.setattr(tensorboard, "start", Mock(side_effect=PrerequisiteError("another program took the port")))
    line = foreground._start_tensorboard(make_run(), None, tensorboard.PROCESS, no_shell, lambda value: None)
    assert "another program took the port" in line


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


def load() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(tensorboard.PROGRAM)))


def test_runs_are_named_by_run_and_task(tmp_path):
    for folder in ("one/tensorboard/chief", "one/tensorboard/chief/keras/train", "two/work/chief/logs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "events.out.tfevents.1").touch()
    runs = load().Multiplexer().AddRunsFromDirectory(str(tmp_path)).Runs()
    assert {"one/chief", "one/chief/keras/train", "two/work/chief/logs"} == set(runs)


def test_the_container_runs_the_same_program():
    stage = (ROOT / "docker" / "Dockerfile").read_text().partition(" AS tensorboard\n")[2].partition("\nFROM ")[0]
    assert f'ENTRYPOINT ["python", "/app/{tensorboard.PROGRAM.name}"]' in stage
    assert "entrypoint" not in (ROOT / "compose" / "compose.yaml").read_text()


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_cards_are_pinned_unless_the_user_chose_others(path):
    board = load()
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("index.html", "the page")
    client = Client(TensorBoardWSGI([board.Loader().load(TBContext(assets_zip_provider=lambda: file))]))
    sent = client.get(path)
    (cards,) = parse_qs(urlsplit(sent.headers["Location"]).query)["pinnedCards"]
    assert (302, list(board.PINNED)) == (sent.status_code, [card["tag"] for card in json.loads(cards)])
    for query in (sent.headers["Location"], "?pinnedCards=[]"):
        assert "the page" in client.get(path + query).text
