"""Files and folders: opening them without following links, their hashes, locks and scratch folders.

Tasks can write to the folder of their run, so a task could put a link there and wait for another user, perhaps root, to
follow it. Below a guarded folder no function of this module follows a link, not even in the middle of a path, or opens
anything but regular files. Each part of a path is opened relative to the previous part, so that none can be swapped
between a check and its use.

A scratch folder is removed even if its process is killed by SIGKILL: the process keeps it locked, and the next process
that needs a scratch folder removes those that are unlocked.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the checkout, or of the code in a container."""
LOCK_TIMEOUT_S = 5.0
LOCK_POLL_S = 0.01
STALE_READS = 20
"""Number of attempts to open a file that another host keeps replacing."""
STALE_POLL_S = 0.01

_guarded: set[str] = set()


class LinkError(OSError):
    """A path in a run folder is a link, or something else that is not a regular file."""


def guard(folder: Path) -> None:
    """From now on, follow no links below this folder; the folder itself may be a link."""
    _guarded.add(str(folder))


@dataclass(frozen=True)
class Folder:
    """An open folder. Its entries are named relative to it."""

    path: Path
    descriptor: int
    guarded: bool

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open an entry and return its descriptor; `mode` is for an entry that is created.

        Raises OSError if it cannot be opened, or if it is a link or of the wrong type in a guarded folder.
        """
        if self.guarded:
            if name == "..":
                raise _refused(self.path / name)
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe without a writer would block
        try:
            descriptor = os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=self.descriptor)
        except OSError as error:
            if self.guarded and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise _refused(self.path / name) from error
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        if self.guarded and not flags & os.O_DIRECTORY and not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _refused(self.path / name)
        return descriptor

    def rename(self, name: str, to: str) -> None:
        """Rename an entry, replacing any entry with the new name."""
        os.replace(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def link(self, name: str, to: str) -> None:
        """Create a hard link to an entry, or raise FileExistsError. Of several callers one succeeds, even on NFS."""
        os.link(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file or a link, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Flush the folder's entries to the disk."""
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def open_folder(path: Path, *, make: bool = False) -> Iterator[Folder]:
    """Context manager that opens a folder; `make` creates it and its parents, but not a guarded folder itself.

    Raises OSError if it cannot be opened, or if its path has a link below a guarded folder.
    """
    root = next((folder for folder in reversed((path / "file").parents) if str(folder) in _guarded), None)
    base = root or path
    if make and not root:
        base.mkdir(parents=True, exist_ok=True)
    folder = Folder(base, os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), guarded=root is not None)
    try:
        for part in path.relative_to(base).parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder.descriptor)
            inner = Folder(folder.path / part, folder.open(part, os.O_PATH | os.O_DIRECTORY), guarded=True)
            os.close(folder.descriptor)
            folder = inner
        yield folder
    finally:
        os.close(folder.descriptor)


def open_file(path: Path, mode: str) -> IO[bytes]:
    """Open a regular file in a binary mode, like the built-in `open`; see `open_folder` for errors."""
    with open_folder(path.parent) as folder:
        return open(path, mode, opener=lambda _, flags: folder.open(path.name, flags))


def read_start(path: Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a file that other processes may replace.

    On a shared file system an opened file may be gone before it is read (ESTALE). Then its replacement is read.
    """
    for _ in range(STALE_READS):
        try:
            with open_file(path, "rb") as file:
                return file.read(limit)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            stale = error
        time.sleep(STALE_POLL_S)
    raise stale


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    with open_folder(path, make=True):
        pass


def remove(path: Path) -> None:
    """Remove a file or a link, if it exists."""
    with contextlib.suppress(FileNotFoundError), open_folder(path.parent) as folder:
        folder.remove(path.name)


def rename(path: Path, name: str) -> None:
    """Rename a file within its folder, replacing any file with the new name."""
    with open_folder(path.parent) as folder:
        folder.rename(path.name, name)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: a reader sees the previous text or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_file(scratch, "wb") as file:
            file.write(text.encode(errors="backslashreplace"))
        rename(scratch, path.name)
    finally:
        remove(scratch)


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk."""
    if path.is_dir():
        with open_folder(path) as folder:
            folder.sync()
    else:
        with open_file(path, "rb") as file:
            os.fsync(file.fileno())


def refuse_links(folder: Path) -> None:
    """Raise OSError if a folder or its path has a link, which programs would follow, or the folder a special file."""
    if not os.path.lexists(folder):
        return
    with open_folder(folder):
        pass
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if not stat.S_ISREG(mode := (path := Path(parent, name)).lstat().st_mode) and not stat.S_ISDIR(mode):
                raise _refused(path)


def make_readable(folder: Path) -> None:
    """Make this user's folder and all its entries readable for every user, as containers run as another user."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in (*folders, *files))):
            mode = path.lstat().st_mode
            missing = (0o555 if mode & stat.S_IXUSR else 0o444) & ~mode
            if missing and not stat.S_ISLNK(mode):
                path.chmod(mode | missing)


def lock(descriptor: int, timeout_s: float | None = None) -> bool:
    """Lock an open file until it is closed; return False if another process still holds the lock after `timeout_s`."""
    deadline = time.monotonic() + (LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(LOCK_POLL_S)


def sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes in hexadecimal."""
    with open_file(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # an open file has `readinto`


def files_sha256(folder: Path, names: Iterable[str], begin: bytes = b"") -> str:
    """Return the sha256, in hexadecimal, of `begin` and of the names and contents of files in a folder."""
    digest = hashlib.sha256(begin)
    for name in sorted(names):
        digest.update(f"{name}\0{sha256(folder / name)}\0".encode())
    return digest.hexdigest()


def _refused(path: Path) -> LinkError:
    return LinkError(errno.ELOOP, "a link or a special file, which is not opened", str(path))


PREFIX = "tf-cluster-tmp-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Context manager that creates a scratch folder and removes it at the end. Forks keep it locked as well."""
    remove_abandoned()
    path, descriptor = _create()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned() -> None:
    """Remove the scratch folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if lock(descriptor, 0.0) and os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)  # it follows no link
            finally:
                os.close(descriptor)


def _create() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            locked = True
            with contextlib.suppress(OSError):  # no locks on this file system: the folder remains after a kill
                locked = lock(descriptor, 0.0)
            if locked and path.exists():
                return path, descriptor
            os.close(descriptor)
