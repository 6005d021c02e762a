"""Folders for temporary files that disappear with the process that made them, also after SIGKILL.

The process keeps its folder locked. A folder that nobody has locked was abandoned, and the next process that needs one
removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.system.files import lock

PREFIX = "tf-cluster-tmp-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a folder in the temporary folder, and remove it at the end. Forks keep it locked as well."""
    remove_abandoned()
    path, descriptor = _create()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned() -> None:
    """Remove the folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path) as descriptor:
            if descriptor is not None and os.fstat(descriptor).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)  # it follows no link


def _create() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if _try_lock(descriptor) and path.exists():
                return path, descriptor
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    with contextlib.suppress(OSError):  # a file system without locks: nobody removes the folder if its owner is killed
        return lock(descriptor, 0.0)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Lock a folder; yield None where another process has."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor if lock(descriptor, 0.0) else None
    finally:
        os.close(descriptor)
