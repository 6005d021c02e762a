"""Whole files: how they are written, so that a reader never sees half of one, how they are read, and their hashes.

A run's folder belongs to its tasks, and what they run could lay a link there for whoever looks after the run, perhaps
as root, to follow. So below a guarded folder nothing here goes through a link, not even in the middle of a path, and
nothing but plain files is opened: each part is opened relative to the one before, so that none can be swapped between
a check and its use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from cluster.errors import RunFailed
from cluster.messages import plain

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

RESERVE = "control/reserve"
"""A file of a run folder that keeps a little room on the disk. When the disk is full it goes, so that the outcome can
be recorded."""

RESERVE_BYTES = 256 * 1024


RECORD_BYTES = 2**24
"""The largest record that is read: `compose.json` of the largest cluster has a third of that."""

MAX_DEPTH = 40
"""How deeply a record may be nested."""

LOCK_TIMEOUT_S = 5.0
LOCK_POLL_S = 0.005

MAX_WARNINGS = 1000

_MISSING = object()
_LOG = logging.getLogger("cluster")
_warned: set[str] = set()
_guarded: set[str] = set()


class DamagedError(RunFailed, ValueError):
    """A file of a run that holds nothing that could be read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}; restore it, or remove it")
        self.path = path


class LinkError(OSError):
    """A link, or something else that is no plain file, where a run has one."""


UNREADABLE = (ValueError, LinkError, PermissionError, IsADirectoryError, NotADirectoryError)
"""What reading something raises that is no record."""


def guard(folder: Path) -> None:
    """Follow no link below this folder from now on; it may itself be one."""
    _guarded.add(str(folder))


def open_file(path: Path, mode: str) -> IO[bytes]:
    """Open a plain file: `rb`, `r+b`, `wb`, `ab`, or `a+b`, which reads as well.

    Raises:
        OSError: it cannot be opened, or lies behind a link in a guarded folder.
    """
    flags = {
        "rb": os.O_RDONLY,
        "r+b": os.O_RDWR,
        "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    }[mode]
    with _folder_of(path) as (name, folder):
        return os.fdopen(_open(path, name, flags, folder), mode)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they are there."""
    with _folder_of(path / "any", make=True):
        pass


def let_all_read(folder: Path) -> None:
    """Let everybody read a folder of ours and all in it, whatever the umask was: containers run as another user."""
    for at, inside, names in os.walk(folder):
        for path in (Path(at), *(Path(at, name) for name in (*inside, *names))):
            mode = path.lstat().st_mode
            missing = (0o555 if mode & stat.S_IXUSR else 0o444) & ~mode
            if missing and not stat.S_ISLNK(mode):
                path.chmod(mode | missing)


def remove(path: Path) -> None:
    """Remove a file or a link, if it is there."""
    with contextlib.suppress(FileNotFoundError), _folder_of(path) as (name, folder):
        os.unlink(name, dir_fd=folder)


def rename(path: Path, name: str) -> None:
    """Give a file another name in its folder, in the place of what has that now."""
    with _folder_of(path) as (old, folder):
        os.replace(old, old.removesuffix(path.name) + name, src_dir_fd=folder, dst_dir_fd=folder)


def refuse_links(folder: Path) -> None:
    """Check that other programs, which do follow links, find none on the way to a folder nor anywhere in it.

    Raises:
        OSError: there is one.
    """
    if not os.path.lexists(folder):
        return
    with _folder_of(folder / "any"):
        pass
    for at, inside, files in os.walk(folder):
        for name in (*inside, *files):
            if not stat.S_ISREG(mode := (path := Path(at, name)).lstat().st_mode) and not stat.S_ISDIR(mode):
                raise _refused(path)


@contextlib.contextmanager
def _folder_of(path: Path, *, make: bool = False) -> Iterator[tuple[str, int | None]]:
    """Open the folder that a file lies in; yield the file's name there and the descriptor, None where nothing guards.

    Raises:
        OSError: there is none, or there is a link on the way.
    """
    root = next((folder for folder in reversed(path.parents) if str(folder) in _guarded), None)
    if root is None:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield str(path), None
        return
    if make:
        root.mkdir(parents=True, exist_ok=True)
    at, descriptor = root, os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path.relative_to(root).parts[:-1]:
            at /= part
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            inside = _open(at, part, os.O_RDONLY | os.O_DIRECTORY, descriptor)
            os.close(descriptor)
            descriptor = inside
        yield path.name, descriptor
    finally:
        os.close(descriptor)


def _open(path: Path, name: str, flags: int, folder: int | None) -> int:
    """Open a file by its name in a folder, if it is what the flags say, and `path` in what is told of it."""
    if folder is None:
        return os.open(name, flags | os.O_CLOEXEC, 0o666)
    if name == "..":
        raise _refused(path)
    try:
        # Without blocking: a pipe that nobody writes to would hold up its reader for ever.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _refused(path) from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    if not flags & os.O_DIRECTORY and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path)
    return descriptor


def _refused(path: Path) -> LinkError:
    return LinkError(errno.ELOOP, "a link, or nothing that a run has here, and it is not followed", str(path))


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace a JSON file whole: a reader sees the value before or this one, also after a crash.

    Args:
        path: the file.
        value: what it holds from now on.
        durable: whether it is on the disk when this returns. Without, a power failure may take it back, or leave it
            empty: for what is written every second, where waiting for the disk costs more than one lost value.
    """
    with _folder_of(path, make=True) as (name, folder):
        with _scratch(path, value, name, folder, durable=durable) as scratch:
            os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
        if durable:
            _sync_folder(path, folder)


def create_json(path: Path, value: Any, check: Callable[[Any], object] = lambda value: None) -> bool:
    """Create a JSON file, whole, unless it exists; return whether this call created it.

    A file that holds no such value claims nothing, as one that a power failure left empty: it is replaced, by one of
    those who find it so.

    Args:
        path: the file.
        value: what it holds from now on.
        check: raises ValueError for what is no such value.
    """
    with _folder_of(path, make=True) as (name, folder), _scratch(path, value, name, folder) as scratch:
        try:  # atomic, and fails where the name is taken, also on NFS
            os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            if not _replace_damaged(path, name, folder, scratch, check):
                return False
        _sync_folder(path, folder)
    return True


def _replace_damaged(path: Path, name: str, folder: int | None, scratch: str, check: Callable[[Any], object]) -> bool:
    """Put a scratch file in the place of a damaged one; return whether this call did.

    Only who holds the lock replaces, having looked again, so that what another claimed meanwhile stays.
    """
    if _claims(path, check):
        return False
    lock_name = name.removesuffix(path.name) + f".{path.name}.lock"
    lock = _open(path.with_name(f".{path.name}.lock"), lock_name, os.O_RDWR | os.O_CREAT, folder)
    try:
        if not locked(lock):
            raise OSError(errno.EAGAIN, "somebody holds its lock", str(path))
        if _claims(path, check):
            return False
        try:
            os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
            os.rename(name, f"{lock_name}.{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=folder)
            os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(lock)
    return True


def _claims(path: Path, check: Callable[[Any], object]) -> bool:
    try:
        check(read_json(path))
    except (DamagedError, ValueError, FileNotFoundError):
        return False
    return True


def locked(descriptor: int, timeout_s: float = LOCK_TIMEOUT_S) -> bool:
    """Lock an open file for this process alone until it is closed; return False where another keeps it too long."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_S)
        else:
            return True


@contextlib.contextmanager
def _scratch(path: Path, value: Any, name: str, folder: int | None, *, durable: bool = True) -> Iterator[str]:
    """Write a value beside `path`; on a full disk into the room that the run folder keeps for its last words.

    The scratch file's name is random: process ids are the same in many containers, which share the folder.
    """
    data = (json.dumps(value, indent=2) + "\n").encode()
    beside = f".{path.name}.{os.urandom(8).hex()}"
    scratch = name.removesuffix(path.name) + beside

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(_open(path.with_name(beside), scratch, flags, folder), "wb") as file:
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
            for above in path.parents[:3]:
                remove(above / RESERVE)
            write()
        yield scratch
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(scratch, dir_fd=folder)


def _sync_folder(path: Path, folder: int | None) -> None:
    """Have the names in a file's folder on the disk, too."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if folder is None else folder
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise
    finally:
        if folder is None:
            os.close(descriptor)


def read_json(path: Path, default: Any = _MISSING, *, limit: int = RECORD_BYTES) -> Any:
    """Return a JSON file's value, or `default` where there is none yet.

    What lies there is not trusted. A file without a value, such as an empty one after a power failure, counts as one
    that is not there yet: with a default, that is returned, and a warning is logged once.

    Args:
        path: the file.
        default: for a file that is not there; without, it has to be.
        limit: the largest file that is read, in bytes.

    Raises:
        FileNotFoundError: there is none, and no default.
        DamagedError: it holds no JSON value, or is no plain file, and there is no default.
    """
    try:
        with open_file(path, "rb") as file:
            return parse_json(file.read(limit + 1), limit)
    except FileNotFoundError:
        if default is _MISSING:
            raise
        return default
    except UNREADABLE as error:
        damaged = DamagedError(path, _reason(error))
        if default is _MISSING:
            raise damaged from error
        warn_once(damaged)
        return default


def parse_json(text: bytes, limit: int = RECORD_BYTES) -> Any:
    """Return the value of a JSON text from somebody who is not trusted.

    Raises:
        ValueError: it is none, too long, or nested more deeply than any record.
    """
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
        level = [part for each in level if isinstance(each, dict | list) for part in _parts(each)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _reason(error: BaseException) -> str:
    """Return why a file holds no value, in words that fit in a line."""
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return f"no JSON: {error}" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)


def warn_once(damaged: DamagedError) -> None:
    """Log that a file is damaged, but not again for the same file and reason."""
    if str(damaged) not in _warned and len(_warned) < MAX_WARNINGS:
        _warned.add(str(damaged))
        _LOG.warning("warning: %s", plain(str(damaged)))


def sync(path: Path) -> None:
    """Return once a file's contents, or a folder's entries, are on the disk."""
    with _folder_of(path) as (name, folder):
        flags = os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else 0)
        descriptor = _open(path, name, flags, folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes in hexadecimal."""
    with open_file(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # what is open has `readinto`


def files_sha256(folder: Path, names: Iterable[str], begin: bytes = b"") -> str:
    """Return the sha256, in hexadecimal, of `begin` and of the names and contents of files in a folder."""
    digest = hashlib.sha256(begin)
    for name in sorted(names):
        digest.update(f"{name}\0{sha256(folder / name)}\0".encode())
    return digest.hexdigest()
