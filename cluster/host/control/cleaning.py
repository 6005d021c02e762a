"""`invoke clean`: delete old runs, or one by name, after the user has seen which and agreed; never one in progress."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.contract import spec
from cluster.contract.run import claim
from cluster.contract.run.folder import RunFolder
from cluster.host.launch.teardown import in_progress
from cluster.system.errors import ClusterError, UsageError, nearest
from cluster.system.messages import short_path

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
    """Return the runs that ended so long ago, and that are not in progress; the oldest first."""
    found = []
    for path in runs_dir.iterdir() if runs_dir.is_dir() else ():
        run = RunFolder(path)
        if path.name.startswith(".") or not _is_run(run):
            continue
        ended = _ended(run)
        if time.time() - ended >= older_s and not in_progress(run):
            found.append(Old(run, ended))
    return sorted(found, key=lambda old: old.ended)


def named(runs_dir: Path, name: str) -> Old:
    """Return the run of this name.

    Raises:
        UsageError: there is none, or it is in progress.
    """
    run = RunFolder(runs_dir / spec.check_run_name(name))
    if not _is_run(run):
        known = [path.parent.name for path in runs_dir.glob("*/cluster.json")]
        raise UsageError(f"there is no run {name!r} in {short_path(runs_dir)}{nearest(name, known) if known else ''}")
    if in_progress(run):
        raise UsageError(f"run {name!r} is in progress; `invoke down {name}` before it is deleted")
    return Old(run, _ended(run))


def _is_run(run: RunFolder) -> bool:
    """Return whether a folder is a run, or what a killed command left of one."""
    if run.path.is_symlink():
        return False  # what a link leads to is not ours to delete
    return not claim.held(run) if run.incomplete else run.cluster.exists()


def _ended(run: RunFolder) -> float:
    """Return when a run ended, or else last did something, by the files that its commands and tasks write."""
    if run.summary.exists():  # a report or an export of a later day does not make it younger
        return run.outcome.time if run.outcome else run.summary.lstat().st_mtime
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
