"""JSON files, whose content is not trusted.

A file with one value is replaced or created atomically, so that a reader never sees a part of it. A JSON Lines file is
appended to by several processes and read as it grows; damaged lines are skipped.
"""

import contextlib
import errno
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from cluster.system.errors import RunFailed
from cluster.system.files import Folder, LinkError, lock, open_file, open_folder, read_start, remove
from cluster.system.messages import plain

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

RESERVE = "control/reserve"
"""A file of a run folder that is removed when the disk is full, so that there is room to record the outcome."""
RESERVE_BYTES = 256 * 1024

RECORD_BYTES = 2**24
"""The largest record that is read, three times the `compose.json` of the largest cluster."""
MAX_DEPTH = 40
"""Limit of a record's nesting."""
MAX_WARNINGS = 1000

T = TypeVar("T")

REQUIRED: Any = object()
"""Marks a file without a default, which must exist."""
_LOG = logging.getLogger("cluster")
_warned: set[str] = set()


class DamagedError(RunFailed, ValueError):
    """A file of a run has no valid value."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}; restore it, or remove it")
        self.path = path


UNREADABLE = (ValueError, LinkError, PermissionError, IsADirectoryError, NotADirectoryError)
"""The errors of reading something that is not a record."""


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace a JSON file atomically: a reader sees the previous value or the new one, even after a crash.

    Without `durable`, the file is not flushed to the disk, so a power failure may restore the previous value or leave
    the file empty; meant for files that are written every second.
    """
    with open_folder(path.parent, make=True) as folder:
        with _scratch(folder, path.name, value, durable=durable) as scratch:
            folder.rename(scratch, path.name)
        if durable:
            folder.sync()


def create_json(
    path: Path, value: Any, check: Callable[[Any], object] = lambda value: None, *, mode: int = 0o666
) -> bool:
    """Create a JSON file atomically unless it exists; return whether this call created it.

    An existing file without a valid value, such as an empty one after a power failure, does not count: exactly one
    caller replaces it. `check` raises ValueError for an invalid value; `mode` is the file's mode before the umask.
    """
    with open_folder(path.parent, make=True) as folder, _scratch(folder, path.name, value, mode=mode) as scratch:
        try:
            folder.link(scratch, path.name)
        except FileExistsError:
            if not _replace_damaged(folder, path.name, scratch, check):
                return False
        folder.sync()
    return True


def _replace_damaged(folder: Folder, name: str, scratch: str, check: Callable[[Any], object]) -> bool:
    """Replace a damaged file by the scratch file, after another check under a lock; return whether this call did."""
    path = folder.path / name
    if _is_valid(path, check):
        return False
    lock_name = f".{name}.lock"
    with os.fdopen(folder.open(lock_name, os.O_RDWR | os.O_CREAT)) as file:
        if not lock(file.fileno()):
            raise OSError(errno.EAGAIN, "another process holds its lock", str(path))
        if _is_valid(path, check):
            return False
        try:
            folder.rename(scratch, name)
        except IsADirectoryError:
            folder.rename(name, f"{lock_name}.{os.urandom(8).hex()}")
            folder.link(scratch, name)
    return True


def _is_valid(path: Path, check: Callable[[Any], object]) -> bool:
    try:
        read_json(path, check=check)
    except (ValueError, FileNotFoundError):
        return False
    return True


@contextlib.contextmanager
def _scratch(folder: Folder, name: str, value: Any, *, durable: bool = True, mode: int = 0o666) -> Iterator[str]:
    """Context manager that writes a value to a scratch file in the folder; on a full disk, it frees the run's reserve.

    The name is random, since containers that share the folder may have the same process ids.
    """
    data = (json.dumps(value, indent=2) + "\n").encode()
    scratch = f".{name}.{os.urandom(8).hex()}"

    def write() -> None:
        with os.fdopen(folder.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())

    try:
        try:
            write()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            for above in (folder.path, *folder.path.parents[:2]):
                remove(above / RESERVE)
            write()
        yield scratch
    finally:
        folder.remove(scratch)  # unless it was renamed


def read_json(
    path: Path, default: Any = REQUIRED, *, check: Callable[[Any], Any] = lambda value: value, limit: int = RECORD_BYTES
) -> Any:
    """Return the checked value of a JSON file of at most `limit` bytes, or `default` if it does not exist.

    The content is not trusted; `check` raises ValueError if it is invalid. A file without a valid value, such as an
    empty one after a power failure, counts as missing: the default is returned, and a warning is logged once.

    Without a default, raises FileNotFoundError, or DamagedError if it has no valid value or is not a regular file.
    """
    try:
        return check(parse_json(read_start(path, limit + 1), limit))
    except FileNotFoundError:
        if default is REQUIRED:
            raise
        return default
    except UNREADABLE as error:
        damaged = DamagedError(path, _reason(error))
        if default is REQUIRED:
            raise damaged from error
        warn_once(damaged)
        return default


def parse_json(text: bytes, limit: int = RECORD_BYTES) -> Any:
    """Parse an untrusted JSON text; raise ValueError if it is invalid, too long or nested too deeply."""
    if not text.strip():
        raise ValueError("it is empty")
    if len(text) > limit:
        raise ValueError(f"it is longer than {limit} bytes")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not (level := list(itertools.chain.from_iterable(inner))):
            return value
    raise ValueError("it is nested too deeply")


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return f"no JSON: {error}" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)


def warn_once(damaged: DamagedError) -> None:
    """Log that a file is damaged, once for each file and reason."""
    if str(damaged) not in _warned and len(_warned) < MAX_WARNINGS:
        _warned.add(str(damaged))
        _LOG.warning("warning: %s", plain(str(damaged)))


LINE_BYTES = 2**18
"""The longest line; a longer one is split."""
NEWEST_BYTES = 2**28
"""How many bytes at the end of a file `read_json_lines` reads."""
KEPT_BYTES = 2**24
"""How many bytes at the end of a file a `Journal` reads and keeps in memory."""
LOCK_TIMEOUT_S = 2.0
"""After this timeout a line is written without the lock: mixed lines are better than a blocked training."""


def append_json(path: Path, value: Any) -> None:
    """Append a line to a JSON Lines file, without flushing it to the disk.

    If an interrupted writer left part of a line, a line break is added first. Raises OSError if the line cannot be
    written completely.
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


def truncate_json(path: Path, keeps: Callable[[Any], bool]) -> Any:
    """Truncate a JSON Lines file after the last value that `keeps` accepts; return it, or None without one.

    `keeps` raises ValueError for an invalid value.
    """
    with contextlib.suppress(FileNotFoundError), open_file(path, "r+b") as file:
        end = os.fstat(file.fileno()).st_size
        while end:
            begin = max(0, end - LINE_BYTES)
            lines = os.pread(file.fileno(), end - begin, begin).splitlines(keepends=True)
            for line in reversed(lines[1:] if begin and lines[1:] else lines):  # the first may be the end of a line
                with contextlib.suppress(ValueError):
                    if keeps(value := parse_json(line, LINE_BYTES)):
                        file.truncate(end)
                        return value
                end -= len(line)
        file.truncate(0)
    return None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, including an unfinished last line; damaged lines are skipped."""
    try:
        with open_file(path, "rb") as file:
            _to_newest(file, NEWEST_BYTES)
            for line in iter(lambda: file.readline(LINE_BYTES), b""):
                if (value := _parsed(line)) is not None:
                    yield value
    except FileNotFoundError:
        return
    except UNREADABLE as error:
        warn_once(DamagedError(path, _reason(error)))


class Journal(Generic[T]):
    """Reads a growing JSON Lines file. Each read continues where the previous one stopped. Thread-safe."""

    def __init__(self, path: Path, check: Callable[[Any], T]) -> None:
        """Prepare to read a file, which need not exist yet; `check` raises ValueError to skip a line."""
        self._path, self._check = path, check
        self._lock = threading.Lock()
        self._reset()

    def read(self) -> list[T]:
        """Return the values of all lines so far."""
        with self._lock:
            try:
                with open_file(self._path, "rb") as file:
                    self._continue(file)
            except FileNotFoundError:
                self._reset()
            except UNREADABLE as error:
                self._reset()
                warn_once(DamagedError(self._path, _reason(error)))
            return [*self._values]

    def _reset(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._values: list[T] = []

    def _continue(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
            self._reset()  # another file, or a truncated one
            self._file = (status.st_dev, status.st_ino)
            _to_newest(file, KEPT_BYTES)
            self._offset = file.tell()
        file.seek(self._offset)
        for line in iter(lambda: file.readline(LINE_BYTES), b""):
            if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                break  # an unfinished line; if its writer has died, the next writer ends it
            self._offset += len(line)
            if (value := _parsed(line)) is not None:
                with contextlib.suppress(ValueError):
                    self._values.append(self._check(value))


def _to_newest(file: IO[bytes], limit: int) -> None:
    """Seek to the last `limit` bytes of a file, and to the next line if that may be the middle of one."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - limit))
    if size > limit:
        file.readline(LINE_BYTES)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line, LINE_BYTES)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
