"""What a task's program printed: copied to its log, which is bounded, and read from there as it grows.

A program can print without end, also without ever ending a line. So the log has parts of at most `PART_BYTES`: the
first stays, the newest is `<task>.log`, and of those between only the one before the newest is kept.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cluster.system.files import open_file, remove, rename

PART_BYTES = 64 * 2**20
"""A task's log takes at most three times as much of the disk."""
LINE_BYTES = 2**16
"""A longer line is copied and shown as several."""
CHUNK_BYTES = 2**16
KEPT_LINES = 200
"""A traceback and its message are among them."""
KEPT_CHARACTERS = 2000

GAP = b"... what was printed from here on was left out, until the log goes on ...\n"

_appending = threading.Lock()
"""A task's program and its standby process print to one log."""


def copy(stream: IO[bytes], log: Path, last_lines: list[str], noise: tuple[bytes, ...] = ()) -> None:
    """Copy what a program prints to its log and to this process's own output, until it ends.

    Args:
        stream: the program's output.
        log: the newest part of its log.
        last_lines: where the last lines are kept, as text.
        noise: what is in lines that are left out.
    """
    rest, last = b"", b"\n"
    while data := stream.read1(CHUNK_BYTES):  # type: ignore[attr-defined]  # of a buffered reader
        *lines, rest = (rest + data).split(b"\n")
        lines = [line + b"\n" for line in lines]
        if len(rest) >= LINE_BYTES:
            lines, rest = [*lines, rest], b""
        last = _pass_on(lines, log, last_lines, noise) or last
    last = _pass_on([rest], log, last_lines, noise) or last
    if not last.endswith(b"\n"):
        append(log, b"\n")  # what the next life prints first is a line of its own


def _pass_on(lines: list[bytes], log: Path, last_lines: list[str], noise: tuple[bytes, ...]) -> bytes:
    """Write lines to where they belong; return what was written."""
    kept = [line for line in lines if line and not any(part in line for part in noise)]
    data = b"".join(kept)
    if not data:
        return b""
    append(log, data)
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    told = [text[:KEPT_CHARACTERS] for line in kept if (text := line.decode(errors="replace").rstrip())]
    last_lines[:] = [*last_lines, *told][-KEPT_LINES:]
    return data


def append(log: Path, data: bytes) -> None:
    """Append to a log. A disk that is full must not hold up the program that prints."""
    with _appending, contextlib.suppress(OSError):
        with open_file(log, "ab") as file:
            file.write(data)
            file.flush()
            size = os.fstat(file.fileno()).st_size
        if size >= PART_BYTES:
            _begin_part(log)


def _begin_part(log: Path) -> None:
    """Have a log go on in a new part."""
    first, previous = _parts(log)[:2]
    if not os.path.lexists(first):
        rename(log, first.name)
        return
    if os.path.lexists(previous):
        _mark_gap(first)
        remove(previous)
    rename(log, previous.name)


def _mark_gap(first: Path) -> None:
    with open_file(first, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(GAP)))
        if file.read() != GAP:
            file.write(GAP)


def _parts(log: Path) -> tuple[Path, Path, Path]:
    """Return the parts that a log may have, in the order in which they were printed."""
    return log.with_name(f"{log.name}.first"), log.with_name(f"{log.name}.previous"), log


class Reader:
    """Reads a log as it grows."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offsets: dict[tuple[int, int], int] = {}
        """Up to where each part, known by its file, has been read."""

    def lines(self, *, ended: bool) -> Iterator[bytes]:
        """Yield the lines that were not read yet, without their ends.

        Args:
            ended: whether nothing is printed any more: then also a last line that has no end is one.

        Raises:
            OSError: there is something else in the log's place.
        """
        with contextlib.ExitStack() as stack:
            opened: dict[tuple[int, int], IO[bytes]] = {}
            # The newest first: a part that is renamed meanwhile is then opened twice, not overlooked.
            for path in reversed(_parts(self._log)):
                with contextlib.suppress(FileNotFoundError):
                    file = stack.enter_context(open_file(path, "rb"))
                    found = os.fstat(file.fileno())
                    opened[found.st_dev, found.st_ino] = file
            self._offsets = {key: self._offsets.get(key, 0) for key in opened}
            for at, (key, file) in enumerate(reversed(opened.items()), start=1):
                yield from self._read_on(key, file, ended or at < len(opened))

    def _read_on(self, key: tuple[int, int], file: IO[bytes], ended: bool) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size < self._offsets[key]:
            self._offsets[key] = 0  # it was cut short
        if size - self._offsets[key] > 2 * PART_BYTES:  # no part of ours: only its end is read
            self._offsets[key] = size - PART_BYTES
            yield GAP.removesuffix(b"\n")
        file.seek(self._offsets[key])
        while line := file.readline(LINE_BYTES):
            if not (ended or line.endswith(b"\n") or len(line) == LINE_BYTES):
                break
            self._offsets[key] += len(line)
            yield line.removesuffix(b"\n")


def last_line(log: Path) -> str:
    """Return the last line of a log; empty where there is none."""
    try:
        with open_file(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
            lines = file.read(LINE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
