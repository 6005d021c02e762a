"""Downloads from a server on 127.0.0.1: whole, or refused within a bound with the reason."""

import http.server
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.system.errors import PrerequisiteError
from train.data.prepare import download
from train.data.prepare.download import SourceFile

CONTENT = bytes(range(256)) * 64


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if self.path == "/slow":
            time.sleep(0.5)
        self.wfile.write(CONTENT[:100] if self.path == "/cut" else CONTENT)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(folder: Path, url: str) -> None:
    download.fetch("mnist", [SourceFile("file.gz", url, len(CONTENT), "")], folder, lambda line: None)


def test_a_file_arrives_whole(tmp_path, address):
    fetch(tmp_path, f"{address}/file.gz")
    assert CONTENT == (tmp_path / "file.gz").read_bytes()


def test_an_http_error_gives_its_code(tmp_path, address):
    with pytest.raises(PrerequisiteError, match=r"^127\.0\.0\.1: HTTP 404 Not Found$"):
        fetch(tmp_path, f"{address}/missing")


def test_a_connection_that_breaks_off_is_an_error(tmp_path, address):
    with pytest.raises(PrerequisiteError, match=r"file\.gz: got 100 bytes of 16384$"):
        fetch(tmp_path, f"{address}/cut")


def test_a_download_has_a_deadline(tmp_path, address, monkeypatch):
    monkeypatch.setattr(download, "DOWNLOAD_TIMEOUT_S", 0.1)
    with pytest.raises(PrerequisiteError, match=r"file\.gz: not done within 0\.1 s$"):
        fetch(tmp_path, f"{address}/slow")


def test_a_closed_port_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(PrerequisiteError, match="Connection refused"):
            fetch(tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}/file.gz")


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PROBE_TIMEOUT_S", 0.2)
    given_up = pytest.raises(PrerequisiteError, match=r"^127\.0\.0\.1: (no answer within 0\.2 s|timed out)$")
    with socket.create_server(("127.0.0.1", 0)) as silent, given_up:
        fetch(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/file.gz")


def test_a_resolver_that_hangs_is_given_up(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(download, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: released.wait(5) and [])
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    with pytest.raises(PrerequisiteError, match=r"^data\.invalid: no answer within 0\.2 s$"):
        fetch(tmp_path, "http://data.invalid/file.gz")
    released.set()
