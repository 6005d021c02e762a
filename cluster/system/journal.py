"""JSON Lines files: appended to by several processes, and read as they grow. Damaged lines are skipped."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cluster.system.files import lock, open_file
from cluster.system.json_files import UNREADABLE, DamagedError, parse_json, warn_once

LINE_BYTES = 2**18
"""The longest line that is read whole."""
NEWEST_BYTES = 2**28
"""How much of the end of a file is read."""
KEPT_BYTES = 2**24
"""How much of the end of a file is read and kept in memory."""
LOCK_TIMEOUT_S = 2.0
"""After this long a line is written without the lock: two lines that mix are better than a training that waits."""


def append_json(path: Path, value: Any) -> None:
    """Append a line to a JSON Lines file, without flushing it to the disk.

    If an interrupted writer left part of a line, this one begins on a new line.

    Raises:
        OSError: it cannot be written completely.
    """
    line = (json.dumps(value) + "\n").encode()
    with open_file(path, "a+b") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            lock(file.fileno(), LOCK_TIMEOUT_S)
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(file.fileno(), line) :]


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, including a last line without end; damaged lines are skipped."""
    try:
        with open_file(path, "rb") as file:
            skipped = _to_newest(file, NEWEST_BYTES)
            for line in _lines(file):
                if skipped:
                    skipped = False
                elif (value := _parsed(line)) is not None:
                    yield value
    except FileNotFoundError:
        return
    except UNREADABLE as error:
        warn_once(DamagedError(path, getattr(error, "strerror", None) or str(error)))


class Journal:
    """A growing JSON Lines file. Each read continues where the previous one stopped. Threads may share it."""

    def __init__(self, path: Path, check: Callable[[Any], dict[str, Any]]) -> None:
        """Begin before the first line.

        Args:
            path: the file, which need not exist yet.
            check: returns the checked value of a line, or raises ValueError to skip it.
        """
        self._path, self._check = path, check
        self._lock = threading.Lock()
        self._reset()

    def read(self) -> list[dict[str, Any]]:
        """Return the values of all lines so far."""
        with self._lock:
            try:
                with open_file(self._path, "rb") as file:
                    self._continue(file)
            except FileNotFoundError:
                self._reset()
            except UNREADABLE as error:
                self._reset()
                warn_once(DamagedError(self._path, getattr(error, "strerror", None) or str(error)))
            return [*self._values]

    def _reset(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._values: list[dict[str, Any]] = []

    def _continue(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
            self._reset()  # another file, or a truncated one
            self._file = (status.st_dev, status.st_ino)
            if _to_newest(file, KEPT_BYTES):
                file.readline(LINE_BYTES)
            self._offset = file.tell()
        file.seek(self._offset)
        for line in _lines(file):
            if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                break  # its writer has not finished; if it never does, the next one begins a new line
            self._offset += len(line)
            if (value := _parsed(line)) is not None:
                with contextlib.suppress(ValueError):
                    self._values.append(self._check(value))


def _to_newest(file: IO[bytes], limit: int) -> bool:
    """Seek to the last `limit` bytes of a file; return whether that may be the middle of a line."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - limit))
    return size > limit


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's lines with their ends; lines longer than `LINE_BYTES` are split."""
    while line := file.readline(LINE_BYTES):
        yield line


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if there is none."""
    try:
        value = parse_json(line, LINE_BYTES)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
