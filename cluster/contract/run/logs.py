"""A task's log: copies the program's output to it, bounds its size, and follows it as it grows.

A program can print endlessly, even without ever ending a line. So a log has parts of about `PART_BYTES`, of which only
three are kept: the first, the newest, which is `<task>.log`, and the one before it.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cluster.system.files import open_file, remove, rename
from cluster.system.messages import shortened

PART_BYTES = 64 * 2**20
"""Size at which a part of a log is complete; a log takes about three times as much space."""
LINE_BYTES = 2**16
"""A longer line is split."""
CHUNK_BYTES = 2**16
KEPT_LINES = 1000
"""Number of last lines kept for error reports: enough for a traceback in whose message TensorFlow prints a node."""
KEPT_CHARACTERS = 2000

MARK_S = 5.0
"""How often a log's time and size are recorded, for `logs --since`."""
LAST_BYTES = 4096
"""How much to read for the last line of a log."""

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?|.", re.DOTALL)
"""A terminal's control sequence, or one character."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")

GAP = b"... some output was left out here ...\n"

_appending = threading.Lock()
"""Serializes appending, since a task's program and its standby process share a log."""
_marked_at: dict[Path, float] = {}
"""When each log's time and size were last recorded, by the monotonic clock."""


def copy_output(stream: IO[bytes], log: Path, last_lines: list[str], noise: tuple[bytes, ...] = ()) -> None:
    """Copy a program's output to its log and to this process's stdout, until it ends.

    `last_lines` is updated to the last lines as text; lines that contain a part in `noise` are dropped.
    """
    rest, last = b"", b"\n"
    while data := stream.read1(CHUNK_BYTES):  # type: ignore[attr-defined]  # of a buffered reader
        lines = (rest + data).splitlines(keepends=True)  # also at carriage returns, for progress bars
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        if len(rest) >= LINE_BYTES:
            lines, rest = [*lines, rest], b""
        last = _pass_on(lines, log, last_lines, noise) or last
    last = _pass_on([rest], log, last_lines, noise) or last
    if not last.endswith(b"\n"):
        append_output(log, b"\n")  # the next attempt's output begins on a new line


def _pass_on(lines: list[bytes], log: Path, last_lines: list[str], noise: tuple[bytes, ...]) -> bytes:
    """Write lines to the log, stdout and `last_lines`; return the written bytes."""
    kept = [line for line in lines if line and not any(part in line for part in noise)]
    if not (data := b"".join(kept)):
        return b""
    append_output(log, data)
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    whole = (line for line in kept if not line.endswith(b"\r"))
    texts = [shortened(text, KEPT_CHARACTERS) for line in whole if (text := render_line(line.decode(errors="replace")))]
    last_lines[:] = [*last_lines, *texts][-KEPT_LINES:]
    return data


def append_output(log: Path, data: bytes) -> None:
    """Append to a log, ignoring errors: a full disk must not block the program."""
    with _appending, contextlib.suppress(OSError):
        with open_file(log, "ab") as file:
            _mark(log, file)
            file.write(data)
            file.flush()
            size = os.fstat(file.fileno()).st_size
        if size >= PART_BYTES:
            _begin_part(log)


def _mark(log: Path, file: IO[bytes]) -> None:
    """Record the time and a log's size before new output, at most every `MARK_S`."""
    if time.monotonic() - _marked_at.get(log, -MARK_S) >= MARK_S:
        _marked_at[log] = time.monotonic()
        status = os.fstat(file.fileno())
        with open_file(_marks(log), "ab") as marks:
            marks.write(f"{time.time():.1f} {status.st_ino} {status.st_size}\n".encode())


def _marks(log: Path) -> Path:
    return log.with_name(f"{log.name}.marks")


def _begin_part(log: Path) -> None:
    first, previous = _parts(log)[:2]
    if not os.path.lexists(first):
        rename(log, first.name)
        return
    if os.path.lexists(previous):
        with open_file(first, "r+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(GAP)))
            if file.read() != GAP:
                file.write(GAP)
        remove(previous)
    rename(log, previous.name)


def _parts(log: Path) -> tuple[Path, Path, Path]:
    return log.with_name(f"{log.name}.first"), log.with_name(f"{log.name}.previous"), log


class LogReader:
    """Reads a log as it grows."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offsets: dict[tuple[int, int], int] = {}
        """How far each part, identified by device and inode, has been read."""

    def lines(self, *, ended: bool) -> Iterator[bytes]:
        """Yield new lines without line ends; once the program has `ended`, also an unfinished last line."""
        with contextlib.ExitStack() as stack:
            opened: dict[tuple[int, int], IO[bytes]] = {}
            # Newest first, so that a part which is renamed during the loop is opened twice rather than missed.
            for path in reversed(_parts(self._log)):
                with contextlib.suppress(FileNotFoundError):
                    file = stack.enter_context(open_file(path, "rb"))
                    status = os.fstat(file.fileno())
                    opened[status.st_dev, status.st_ino] = file
            self._offsets = {key: self._offsets.get(key, 0) for key in opened}
            for at, (key, file) in enumerate(reversed(opened.items()), start=1):
                yield from self._read_new(key, file, ended or at < len(opened))

    def skip_until(self, since: float) -> None:
        """Skip output from before `since`, in seconds since the epoch, except for the last few seconds of it."""
        parts = []
        for path in _parts(self._log):
            with contextlib.suppress(OSError), open_file(path, "rb") as file:
                parts.append(os.fstat(file.fileno()))
        first, offset = self._find(since - MARK_S, [part.st_ino for part in parts])
        for at, part in enumerate(parts):
            skipped = part.st_size if at < first else offset if at == first else 0
            self._offsets[part.st_dev, part.st_ino] = skipped

    def _find(self, since: float, inodes: list[int]) -> tuple[int, int]:
        """Return the first part, by its place in `inodes`, with output from after `since`, and where that begins.

        The marks of a removed part remain. A newer part may reuse its inode, but the marks of the parts in between come
        before the newer part's own. The first part is never removed.
        """
        first, offset, newest = len(inodes), 0, -1
        with contextlib.suppress(OSError), open_file(_marks(self._log), "rb") as marks:
            for line in iter(lambda: marks.readline(LINE_BYTES), b""):  # a task may write anything there
                with contextlib.suppress(ValueError):
                    at, inode, size = line.split()
                    if float(at) < since:
                        continue
                    part = inodes.index(int(inode)) if int(inode) in inodes else -1
                    if newest < 0:
                        first, offset = part, max(0, int(size))
                    if first == 0:
                        break
                    if part < max(newest, 0):  # the second part is the oldest that is kept of what is newer
                        return min(1, len(inodes) - 1), 0
                    newest = part
        return first, offset

    def _read_new(self, key: tuple[int, int], file: IO[bytes], ended: bool) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size < self._offsets[key]:
            self._offsets[key] = 0  # it was truncated
        if size - self._offsets[key] > 2 * PART_BYTES:  # not written by this module: read only the end
            self._offsets[key] = size - PART_BYTES
            yield GAP.removesuffix(b"\n")
        file.seek(self._offsets[key])
        while line := file.readline(LINE_BYTES):
            if len(line) == LINE_BYTES and (drawn_over := line.rfind(b"\r")) > 0:
                self._offsets[key] += drawn_over
                file.seek(self._offsets[key])
                continue
            if not (ended or line.endswith(b"\n") or len(line) == LINE_BYTES):
                break
            self._offsets[key] += len(line)
            yield line.removesuffix(b"\n")


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, as a terminal displays it; empty if there is none."""
    try:
        with open_file(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read(LAST_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next(filter(None, map(render_line, reversed(lines))), "")


def render_line(line: str, *, styled: bool = False) -> str:
    """Return a line as a terminal displays it, after carriage returns and backspaces.

    With `styled`, colours and other styles are kept; all other control sequences are dropped.
    """
    if not any(control in line for control in "\r\b\x1b"):
        return line.rstrip()
    cells: list[tuple[str, str]] = []
    at, style = 0, ""
    for part in _CONTROL.findall(line):
        if part == "\r":
            at = 0
        elif part == "\b":
            at = max(0, at - 1)
        elif part in ("\x1b[K", "\x1b[0K", "\x1b[2K"):
            del cells[at if part != "\x1b[2K" else 0 :]
        elif _STYLE.fullmatch(part):
            style = "" if part in ("\x1b[m", "\x1b[0m") else style + part
        elif part[0] not in "\x1b\n":
            cells += [("", " ")] * (at - len(cells))
            cells[at : at + 1] = [(style if styled else "", part)]
            at += 1
    while cells and cells[-1][1].isspace():
        cells.pop()
    shown, last = "", ""
    for style, character in [*cells, ("", "")]:
        shown += ("" if style == last else ("\x1b[m" if last else "") + style) + character
        last = style
    return shown
