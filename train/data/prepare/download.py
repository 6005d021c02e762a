"""Downloads the files of a dataset in bounded time, from the URLs that TFDS records or from Debian's packages.

TFDS's downloader retries for minutes without internet, so it is given these files as manual downloads (`manual_dir`).

Debian's packages are for machines that reach a Debian mirror and little else. `dataset-fashion-mnist` has the original
four files, but with different gzip headers (no name, another time), so that their sha256 differs from the one that TFDS
records. Restoring the headers restores the original files, bit for bit. `dict-jargon` has the compressed text of the
Jargon File. apt-get runs with separate lists and a separate cache: it needs no root and changes nothing on the machine.
"""

import errno
import gzip
import http.client
import os
import shutil
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.system import processes
from cluster.system.errors import PrerequisiteError
from train.data import store

PROBE_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0
DOWNLOAD_TIMEOUT_S = 600.0
_CHUNK_BYTES = 1 << 20

PACKAGES = {"fashion_mnist": "dataset-fashion-mnist", "jargon_file": "dict-jargon"}
COMMAND_TIMEOUT_S = 180.0

_MTIMES = {"train": 1504176606, "t10k": 1504176627}
"""Time at which Zalando compressed the files, in seconds since 1970, by the first part of their names."""

_FNAME = 8
"""Flag of a gzip header that has the file's name."""


@dataclass(frozen=True)
class SourceFile:
    """A file from which TFDS builds a dataset."""

    name: str
    url: str
    """Empty if only a package has the file."""
    size_bytes: int
    sha256: str


def fetch_from_tfds(dataset: str, files: Sequence[SourceFile], folder: Path) -> None:
    """Download `files` into `folder`, if the first address answers within `PROBE_TIMEOUT_S`."""
    if not files[0].url:
        raise PrerequisiteError(f"no address of {files[0].name} is known")
    probe(files[0].url)
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    for file in files:
        store.say(f"downloading {file.name} ({file.size_bytes / 1e6:.1f} MB) for {dataset}")
        _download(file, folder / file.name, deadline)


def probe(url: str) -> None:
    """Open and close `url`, within `PROBE_TIMEOUT_S`."""
    outcome: list[str] = []

    def attempt() -> None:
        try:
            urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S).close()
            outcome.append("")
        except (OSError, http.client.HTTPException) as error:
            outcome.append(_reason(error))

    thread = threading.Thread(target=attempt, daemon=True)  # name resolution has no timeout
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    failure = outcome[0] if outcome else f"no answer within {PROBE_TIMEOUT_S:g} s"
    if failure:
        raise PrerequisiteError(f"{urllib.parse.urlsplit(url).hostname}: {failure}")


def _download(source: SourceFile, path: Path, deadline: float) -> None:
    host = urllib.parse.urlsplit(source.url).hostname
    with path.open("wb") as file:
        try:
            with urllib.request.urlopen(source.url, timeout=SOCKET_TIMEOUT_S) as response:
                while chunk := response.read1(_CHUNK_BYTES):
                    file.write(chunk)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"not done within {DOWNLOAD_TIMEOUT_S:g} s")
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise PrerequisiteError(f"{host}: {source.name}: {_reason(error)}") from None
        size_bytes = file.tell()
    if size_bytes != source.size_bytes:  # read1 does not report that a connection ended early
        raise PrerequisiteError(f"{host}: {source.name}: got {size_bytes} bytes of {source.size_bytes}")


def _reason(error: Exception) -> str:
    """Return a short reason; `URLError` and `OSError` wrap it differently."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(cause, "strerror", None) or cause or type(error).__name__)


def fetch_from_debian(dataset: str, files: Sequence[SourceFile], folder: Path) -> None:
    """Extract the original `files` from Debian's package for `dataset` into `folder`."""
    if dataset not in PACKAGES:
        raise PrerequisiteError(f"Debian has no package of {dataset}")
    if missing := [command for command in ("apt-get", "dpkg-deb") if shutil.which(command) is None]:
        raise PrerequisiteError(f"no {' and no '.join(missing)} on this machine")
    package = PACKAGES[dataset]
    scratch = folder.resolve() / "apt"  # apt would look for a relative path below its own folders
    for name in ("lists/partial", "cache/archives/partial", "unpacked"):
        (scratch / name).mkdir(parents=True)
    store.say(f"fetching Debian's package lists and {package}")
    # The update fails if any repository is unreachable, so only the download counts.
    _, updated = _run([*_apt_get(scratch), "update"], scratch)
    code, downloaded = _run([*_apt_get(scratch), "download", package], scratch)
    if code:
        raise PrerequisiteError(f"{package}: {_first_error(downloaded, updated)}")
    archive = next(scratch.glob(f"{package}_*.deb"))
    code, output = _run(["dpkg-deb", "-x", str(archive), "unpacked"], scratch)
    if code:
        raise PrerequisiteError(f"{archive.name}: {_first_error(output)}")
    unpacked = {path.name: path for path in (scratch / "unpacked").rglob("*") if path.is_file()}
    for file in files:
        packed = f"{file.name}.dz" if f"{file.name}.dz" in unpacked else file.name
        if packed not in unpacked:
            raise PrerequisiteError(f"{archive.name} holds no {packed}")
        (folder / file.name).write_bytes(_original(file.name, unpacked[packed].read_bytes()))
    shutil.rmtree(scratch)


def _original(name: str, content: bytes) -> bytes:
    """Restore the original file: with the name and the time in its gzip header (RFC 1952), or not compressed."""
    if not name.endswith(".gz"):
        return gzip.decompress(content)  # dictzip's files are gzip files
    header = struct.pack("<BI", _FNAME, _MTIMES[name.partition("-")[0]])
    return content[:3] + header + content[8:10] + name.removesuffix(".gz").encode() + b"\0" + content[10:]


def _apt_get(scratch: Path) -> list[str]:
    options = {
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",  # otherwise apt as root would switch to a user without access to these folders
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "10",
        "Acquire::https::Timeout": "10",
    }
    return ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def _run(command: Sequence[str], cwd: Path) -> tuple[int, str]:
    """Run a command; return its exit code and both outputs. Raise PrerequisiteError if it takes too long."""
    in_english = ["/usr/bin/env", "LC_ALL=C", *command]
    code, output, errors = processes.run(in_english, COMMAND_TIMEOUT_S, command[0], cwd=cwd)
    if code == processes.TIMED_OUT:
        raise PrerequisiteError(errors)
    if code and os.strerror(errno.ENOSPC) in output + errors:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return code, output + errors


def _first_error(*outputs: str) -> str:
    """Return the most informative line: a file that could not be fetched (a warning of apt), or the first error."""
    lines = [line.strip() for output in outputs for line in output.splitlines()]
    marks = ("W: Failed", "E: ", "dpkg-deb: error")
    found = (line for mark in marks for line in lines if line.startswith(mark))
    return next(found, "no reason given").removeprefix("W: ").removeprefix("E: ")
