"""Whole files: how they are written, so that a reader never sees half of one, how they are read, and their hashes.

A run's folder belongs to its tasks, and what they run could lay a link there for whoever looks after the run, perhaps
as root, to follow. So below a guarded folder nothing here goes through a link, not even in the middle of a path, and
nothing but plain files is opened: each part is opened relative to the one before, so that none can be swapped between
a check and its use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

RESERVE = "control/reserve"
"""A file of a run folder that keeps a little room on the disk. When the disk is full it goes, so that the outcome can
be recorded."""

RESERVE_BYTES = 256 * 1024


_guarded: set[str] = set()


def guard(folder: Path) -> None:
    """Follow no link below this folder from now on; it may itself be one."""
    _guarded.add(str(folder))


def open_file(path: Path, mode: str) -> IO[bytes]:
    """Open a plain file: `rb`, `r+b`, `wb` or `ab`.

    Raises:
        OSError: it cannot be opened, or lies behind a link in a guarded folder.
    """
    flags = {
        "rb": os.O_RDONLY,
        "r+b": os.O_RDWR,
        "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
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


def _refused(path: Path) -> OSError:
    return OSError(errno.ELOOP, "a link, or nothing that a run has here, and it is not followed", str(path))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file whole."""
    with _folder_of(path, make=True) as (name, folder):
        os.replace(_write_scratch(path, value, name, folder), name, src_dir_fd=folder, dst_dir_fd=folder)


def create_json(path: Path, value: Any) -> bool:
    """Create a JSON file, whole, unless it exists; return whether this call created it."""
    with _folder_of(path, make=True) as (name, folder):
        scratch = _write_scratch(path, value, name, folder)
        try:  # atomic, and fails where the name is taken, also on NFS
            os.link(scratch, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            os.unlink(scratch, dir_fd=folder)
    return True


def _write_scratch(path: Path, value: Any, name: str, folder: int | None) -> str:
    """Write a value beside `path`; on a full disk into the room that the run folder keeps for its last words."""
    data = (json.dumps(value, indent=2) + "\n").encode()
    beside = f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    scratch = name.removesuffix(path.name) + beside

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(_open(path.with_name(beside), scratch, flags, folder), "wb") as file:
            file.write(data)

    try:
        write()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        for above in path.parents[:3]:
            remove(above / RESERVE)
        write()
    return scratch


_MISSING = object()


def read_json(path: Path, default: Any = _MISSING) -> Any:
    """Return a JSON file's value, or `default` where there is none yet."""
    try:
        with open_file(path, "rb") as file:
            return json.loads(file.read())
    except FileNotFoundError:
        if default is _MISSING:
            raise
        return default


def append_json(path: Path, value: Any) -> None:
    """Append one line to a JSON Lines file in a single write."""
    with open_file(path, "ab") as file:
        os.write(file.fileno(), (json.dumps(value) + "\n").encode())


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file; a last line cut short by a crash is left out."""
    try:
        with open_file(path, "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


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
