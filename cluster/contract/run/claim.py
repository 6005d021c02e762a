"""The claim on a run, a lock: only one command at a time may start, resume, scale or end a run.

It locks the file `.running/NAME.lock` next to the run folders. The kernel releases the lock however its holder ends, so
there is nothing to clean up. The file names the holder and is never removed.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import AfterStop
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.files import lock

WAIT_S = 60.0
"""How long a command that ends a run waits for another command that is starting or scaling it."""
MOMENT_S = 0.5
"""How long other commands wait for a claim that is about to be released, or that another command only checks."""

_mine: set[Path] = set()
"""The claims that this process holds."""


class Taken(UsageError):
    """Another command holds the claim, or has just created a run of this name."""


@contextlib.contextmanager
def hold_claim(run: RunFolder, doing: str, *, wait_s: float = MOMENT_S) -> Iterator[None]:
    """Context manager that holds the claim on a run, which need not exist yet; waits at most `wait_s` for it.

    `doing` is the operation, as a participle such as `resumed`, for the errors of other commands. Raises `Taken` if
    another command holds the claim, and PrerequisiteError if the file cannot be locked.
    """
    path = run.outside("lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    with os.fdopen(descriptor, "r+", errors="replace") as file:
        if not _lock(descriptor, path, wait_s):
            holder = file.read().strip() or "used by another command"
            raise Taken(f"run {run.name!r} is being {holder}; wait for it or interrupt it, then try again")
        file.truncate(0)
        print(f"{doing} by process {os.getpid()}", file=file, flush=True)
        _mine.add(path)
        try:
            yield
        finally:
            _mine.discard(path)


def is_held(run: RunFolder) -> bool:
    """Return whether another command holds the claim. Creates no file."""
    path = run.outside("lock")
    if path in _mine:
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    with os.fdopen(descriptor):
        return not _lock(descriptor, path, 0.0)


def is_scaling(run: RunFolder) -> bool:
    """Return whether another command is scaling the run. A killed command holds no claim and does not count."""
    return run.after_stop == AfterStop.SCALE and is_held(run)


def _lock(descriptor: int, path: Path, timeout_s: float) -> bool:
    try:
        return lock(descriptor, timeout_s)
    except OSError as error:  # a file system without locks
        raise _unusable(path.parent, error) from error


def _unusable(folder: Path, error: OSError) -> PrerequisiteError:
    fix = "give write access, or set RUNS_DIR to a folder of yours on a disk with locks"
    return PrerequisiteError(f"{folder}: {error.strerror}; {fix}")
