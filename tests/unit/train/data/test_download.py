"""Files from a server on 127.0.0.1 and from Debian's packages: whole, or refused within a bound with the reason."""

import gzip
import http.server
import io
import os
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
    download.fetch_from_tfds("mnist", [SourceFile("file.gz", url, len(CONTENT), "")], folder)


def test_a_file_arrives_whole(tmp_path, address):
    fetch(tmp_path, f"{address}/file.gz")
    assert CONTENT == (tmp_path / "file.gz").read_bytes()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", r"^127\.0\.0\.1: HTTP 404 Not Found$"),
        ("cut", r"file\.gz: got 100 bytes of 16384$"),
        ("slow", r"file\.gz: not done within 0\.1 s$"),
    ],
)
def test_a_download_that_fails_gives_its_reason(tmp_path, address, monkeypatch, name, reason):
    if name == "slow":
        monkeypatch.setattr(download, "DOWNLOAD_TIMEOUT_S", 0.1)
    with pytest.raises(PrerequisiteError, match=reason):
        fetch(tmp_path, f"{address}/{name}")


@pytest.mark.parametrize(
    ("listens", "reason"), [(False, "Connection refused"), (True, r"(no answer within 0\.2 s|timed out)$")]
)
def test_a_server_that_is_not_there_or_never_answers_is_given_up(tmp_path, monkeypatch, listens, reason):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PROBE_TIMEOUT_S", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        with pytest.raises(PrerequisiteError, match=rf"^127\.0\.0\.1: .*{reason}"):
            fetch(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}/file.gz")


def test_a_resolver_that_hangs_is_given_up(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(download, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: released.wait(5) and [])
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    with pytest.raises(PrerequisiteError, match=r"^data\.invalid: no answer within 0\.2 s$"):
        fetch(tmp_path, "http://data.invalid/file.gz")
    released.set()


# Debian's packages; apt-get and dpkg-deb are stubs

FILES = tuple(SourceFile(f"{part}-labels-idx1-ubyte.gz", "http://x", 1, "") for part in ("train", "t10k"))


def gzip_file(name: str, mtime: int, payload: bytes) -> bytes:
    """Return a gzip file whose header has the time and the name without `.gz`, if there is one."""
    buffer = io.BytesIO()
    with gzip.GzipFile(name, "wb", fileobj=buffer, mtime=mtime) as file:
        file.write(payload)
    return buffer.getvalue()


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Make `scripts` the only commands on the PATH."""
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def fetch_package(folder: Path, dataset: str = "fashion_mnist") -> None:
    folder.mkdir()
    download.fetch_from_debian(dataset, FILES, folder)


def test_the_files_come_out_as_they_originally_were(tmp_path, monkeypatch):
    packed = tmp_path / "packed"
    packed.mkdir()
    for file in FILES:
        (packed / file.name).write_bytes(gzip_file("", 1591348973, file.name.encode()))
    stub(
        tmp_path / "bin",
        monkeypatch,
        apt_get='for word; do last=$word; done; [ "$last" = update ] || : > dataset-fashion-mnist_1_all.deb',
        dpkg_deb=f'[ -e "$2" ] && {os.path.realpath("/bin/cp")} {packed}/* "$3"',
    )
    fetch_package(tmp_path / "sources")
    assert {file.name for file in FILES} == {path.name for path in (tmp_path / "sources").iterdir()}
    for file, mtime in zip(FILES, (1504176606, 1504176627), strict=True):
        original = gzip_file(file.name, mtime, file.name.encode())
        assert original == (tmp_path / "sources" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("apt_get", "reason"),
    [
        ("echo 'E: Unable to locate package dataset-fashion-mnist'; exit 100", "Unable to locate package"),
        ("echo 'W: Failed to fetch X  Temporary failure resolving'; echo 'E: no'; exit 100", "Temporary failure"),
        ("exit 100", "no reason given"),
        (f"exec {os.path.realpath('/bin/sleep')} 60", "apt-get did not answer in 0.2 s"),
        ("echo 'E: Write error - No space left on device'; exit 100", "No space left on device"),
    ],
)
def test_a_failing_apt_gives_its_reason(tmp_path, monkeypatch, apt_get, reason):
    monkeypatch.setattr(download, "COMMAND_TIMEOUT_S", 0.2 if "sleep" in apt_get else 60)
    stub(tmp_path / "bin", monkeypatch, apt_get=apt_get, dpkg_deb="")
    with pytest.raises(OSError if "space" in reason else PrerequisiteError, match=reason):
        fetch_package(tmp_path / "sources")


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [("fashion_mnist", "no apt-get and no dpkg-deb on this machine"), ("mnist", "Debian has no package of mnist")],
)
def test_a_system_or_a_dataset_without_a_package_is_reported(tmp_path, monkeypatch, dataset, reason):
    stub(tmp_path / "bin", monkeypatch)
    with pytest.raises(PrerequisiteError, match=reason):
        fetch_package(tmp_path / "sources", dataset)
