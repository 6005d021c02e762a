"""Whole files: how they are written, so that a reader never sees half of one, how they are read, and their hashes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

RESERVE = "control/reserve"
"""A file of a run folder that keeps a little room on the disk. When the disk is full it goes, so that the outcome can
be recorded."""

RESERVE_BYTES = 256 * 1024


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file whole."""
    _write_scratch(path, value).replace(path)


def create_json(path: Path, value: Any) -> bool:
    """Create a JSON file, whole, unless it exists; return whether this call created it."""
    scratch = _write_scratch(path, value)
    try:
        os.link(scratch, path)  # atomic, and fails where the name is taken, also on NFS
    except FileExistsError:
        return False
    finally:
        scratch.unlink()
    return True


def _write_scratch(path: Path, value: Any) -> Path:
    """Write a value beside `path`; on a full disk into the room that the run folder keeps for its last words."""
    text = json.dumps(value, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        scratch.write_text(text)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        for folder in path.parents[:3]:
            (folder / RESERVE).unlink(missing_ok=True)
        scratch.write_text(text)
    return scratch


_MISSING = object()


def read_json(path: Path, default: Any = _MISSING) -> Any:
    """Return a JSON file's value, or `default` where there is none yet."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        if default is _MISSING:
            raise
        return default


def append_json(path: Path, value: Any) -> None:
    """Append one line to a JSON Lines file in a single write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(value) + "\n").encode())
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file; a last line cut short by a crash is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(folder: Path, names: Iterable[str], begin: bytes = b"") -> str:
    """Return the sha256, in hexadecimal, of `begin` and of the names and contents of files in a folder."""
    digest = hashlib.sha256(begin)
    for name in sorted(names):
        digest.update(f"{name}\0{sha256(folder / name)}\0".encode())
    return digest.hexdigest()
