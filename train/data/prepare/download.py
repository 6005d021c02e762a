"""Downloads the files of a TFDS dataset from the addresses that TFDS records, in bounded time.

TFDS's downloader retries for minutes without internet. Here TFDS gets the files like manually downloaded ones
(`manual_dir`).
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.system.errors import PrerequisiteError

PROBE_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0
DOWNLOAD_TIMEOUT_S = 600.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file from which TFDS builds a dataset."""

    name: str
    url: str
    """Empty if only a package has the file."""
    size_bytes: int
    sha256: str


def fetch(dataset: str, files: Sequence[SourceFile], folder: Path, say: Callable[[str], None]) -> None:
    """Download `files` into `folder`, if the first address answers within `PROBE_TIMEOUT_S`."""
    if not files[0].url:
        raise PrerequisiteError(f"no address of {files[0].name} is known")
    probe(files[0].url)
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    for file in files:
        say(f"downloading {file.name} ({file.size_bytes / 1e6:.1f} MB) for {dataset}")
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
