"""Who may start, resume, scale or end a run: one command at a time.

The claim is a lock on `.running/NAME.lock` beside the run folders. The kernel releases it with the process that holds
it, however that ends, so there is nothing to clean up; the file says which process that is, and is not removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import PrerequisiteError, UsageError
from cluster.run.folder import RunFolder
from cluster.system.files import lock

WAIT_S = 60.0
"""Longest wait of a command that ends a run for the one that is starting or scaling it."""
MOMENT_S = 0.5
"""How long a claim is waited for that is only looked at, or about to be released."""


class Taken(UsageError):
    """Another command is at work on the run, or has just made one of that name."""


def lock_path(run: RunFolder) -> Path:
    """Return the file whose lock is the claim."""
    return run.path.parent / ".running" / f"{run.name}.lock"


@contextlib.contextmanager
def hold(run: RunFolder, doing: str, *, wait_s: float = MOMENT_S) -> Iterator[None]:
    """Be the only command that is at work on a run.

    Args:
        run: existing or to be made.
        doing: what happens to the run, as a participle such as `resumed`, for the others' error.
        wait_s: longest wait for another command.

    Raises:
        Taken: another command is at work on it.
        PrerequisiteError: the folder of all runs cannot hold the lock.
    """
    path = lock_path(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    try:
        if not _lock(descriptor, path, wait_s):
            raise Taken(_describe(run, path))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{doing} by process {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def held(run: RunFolder) -> bool:
    """Whether a command is at work on the run. Makes no file."""
    path = lock_path(run)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _lock(descriptor, path, 0.0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, timeout_s: float) -> bool:
    try:
        return lock(descriptor, timeout_s)
    except OSError as error:  # a file system without locks
        raise _unusable(path.parent, error) from error


def _describe(run: RunFolder, path: Path) -> str:
    """Return who is at work on the run, as far as that wrote it down already."""
    try:
        who = path.read_text(errors="replace").strip() or "used by another command"
    except OSError:
        who = "used by another command"
    return f"run {run.name!r} is being {who}; wait for it or interrupt it, then try again"


def _unusable(folder: Path, error: OSError) -> PrerequisiteError:
    return PrerequisiteError(
        f"{folder}: {error.strerror}; give write access, or set RUNS_DIR to a folder of yours on a disk with locks"
    )
