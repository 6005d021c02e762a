"""JSON Lines files of a run folder: appended to by several tasks, read as they grow, whatever a crash left in them.

Each line is a value of its own, so one that is damaged costs none of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cluster.system.files import lock, open_file
from cluster.system.json_files import UNREADABLE as NO_FILE
from cluster.system.json_files import DamagedError, parse_json, warn_once

LINE_BYTES = 2**18
"""The longest line that is read."""
NEWEST_BYTES = 2**28
"""How much of a file is read: what comes before its newest lines is left out."""
KEPT_BYTES = 2**24
"""How much of one whose lines are kept."""
LOCK_TIMEOUT_S = 2.0
"""After this long a line is written without the lock: better two that mix than a training that waits."""


def append_json(path: Path, value: Any) -> None:
    """Append a line to a JSON Lines file. It is not forced to the disk: a power failure may cost the newest lines.

    What a writer that was interrupted left of its line ends here, and takes no other line with it.

    Raises:
        OSError: it cannot be written, or not wholly.
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
    """Yield the objects of a JSON Lines file, also of its last line if that has no end; damaged lines are left out."""
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
    except NO_FILE as error:
        warn_once(DamagedError(path, getattr(error, "strerror", None) or str(error)))


class Journal:
    """A JSON Lines file that grows: each look reads what is new alone. Threads may share one."""

    def __init__(self, path: Path, check: Callable[[Any], dict[str, Any]]) -> None:
        """Begin before the first line.

        Args:
            path: the file, which need not be there yet.
            check: returns a line's value as it shall be, or raises ValueError where it is none; then it is left out.
        """
        self._path, self._check = path, check
        self._lock = threading.Lock()
        self._forget()

    def read(self) -> list[dict[str, Any]]:
        """Return the values of all lines so far."""
        with self._lock:
            try:
                with open_file(self._path, "rb") as file:
                    self._read_on(file)
            except FileNotFoundError:
                self._forget()
            except NO_FILE as error:
                self._forget()
                warn_once(DamagedError(self._path, getattr(error, "strerror", None) or str(error)))
            return [*self._values]

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._values: list[dict[str, Any]] = []

    def _read_on(self, file: IO[bytes]) -> None:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset:
            self._forget()  # another file, or one that was cut short
            self._file = (found.st_dev, found.st_ino)
            if _to_newest(file, KEPT_BYTES):
                file.readline(LINE_BYTES)
            self._offset = file.tell()
        file.seek(self._offset)
        for line in _lines(file):
            if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                break  # its writer is not done, or never will be: the next one begins a new line
            self._offset += len(line)
            if (value := _parsed(line)) is not None:
                with contextlib.suppress(ValueError):
                    self._values.append(self._check(value))


def _to_newest(file: IO[bytes], limit: int) -> bool:
    """Go to where the part of a file begins that is read; return whether that is in the middle of a line, perhaps."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - limit))
    return size > limit


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's lines with their ends; one that is longer than is read in parts of that length."""
    while line := file.readline(LINE_BYTES):
        yield line


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line's value; None where it holds no object."""
    try:
        value = parse_json(line, LINE_BYTES)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
