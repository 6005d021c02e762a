"""`invoke clean`: old runs are deleted, once it was said which and the user agreed; never one in progress."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError, UsageError
from cluster.launch.teardown import in_progress
from cluster.run import claim
from cluster.run.folder import RunFolder

UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class Old:
    """A run that can be deleted."""

    run: RunFolder
    ended: float
    """Seconds since the epoch."""


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `7d`, `12h`, `30m` or `2w`.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", text.strip())
    if not match:
        raise UsageError(f"--older {text!r}: expected a number with m, h, d or w behind it, such as 7d")
    return float(match[1]) * UNITS[match[2]]


def find(runs_dir: Path, older_s: float) -> list[Old]:
    """Return the runs that nothing has been written to for so long, and that are not in progress; the oldest first."""
    found = []
    for path in runs_dir.iterdir() if runs_dir.is_dir() else ():
        if path.is_symlink() or path.name.startswith("."):
            continue  # what a link leads to is not ours to delete
        run = RunFolder(path)
        if claim.held(run) if run.incomplete else not run.cluster.exists():
            continue
        ended = _last_written(run)
        if time.time() - ended >= older_s and not in_progress(run):
            found.append(Old(run, ended))
    return sorted(found, key=lambda old: old.ended)


def _last_written(run: RunFolder) -> float:
    """Return when a run last did something, by the files that each of its commands and tasks writes."""
    paths = [run.path, run.summary, run.events_log, run.cluster, run.control, *(run.path / "status").glob("*.json")]
    return max((path.lstat().st_mtime for path in paths if path.exists()), default=0.0)


def delete(old: Old) -> None:
    """Delete a run, unless it was resumed meanwhile.

    Raises:
        UsageError: it is in progress, or another command is at work on it.
        OSError: it cannot be deleted, or not all of it.
    """
    with claim.hold(old.run, "deleted"):
        if in_progress(old.run):
            raise UsageError(f"run {old.run.name!r} is in progress again; it stays")
        old.run.delete()


def delete_all(found: list[Old]) -> list[str]:
    """Delete runs; return what could not be deleted, in words."""
    left = []
    for old in found:
        try:
            delete(old)
        except (ClusterError, OSError) as error:
            left.append(f"{old.run.name}: {' '.join(str(error).split())}")
    return left
