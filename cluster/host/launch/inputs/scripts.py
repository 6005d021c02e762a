"""Scripts that run in every task: which can be used, and the folder that each task runs one in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cluster.contract import settings
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec
from cluster.host.runtime.payload import Payload
from cluster.system.errors import UsageError
from cluster.system.files import make_folder


def check_path(option: str, name: str) -> None:
    """Check that a path can be one.

    Raises:
        UsageError: the system takes no such path, or it cannot be shown in one line.
    """
    if not name.isprintable():
        raise UsageError(f"--{option} {name!r}: a path without control characters is expected; rename that file")


def check_script(name: str, runs_dir: Path) -> Path:
    """Return the script's path.

    Raises:
        UsageError: there is no such file, it cannot be read, or its folder cannot be shared with the tasks.
    """
    check_path("script", name)
    script = settings.expanded("script", name).resolve()
    if not script.is_file() or not os.access(script, os.R_OK):
        what = "is a folder" if script.is_dir() else "cannot be read" if script.exists() else "does not exist"
        raise UsageError(f"--script {name!r} {what}: expected a Python file that reads TF_CONFIG; name one")
    folder = script.parent
    shared = {Path("/"): "the root of the file system"}
    if home := settings.home():
        shared[home.resolve()] = "your home folder"
    if folder in shared:
        raise UsageError(
            f"--script {name!r} lies in {shared[folder]}, and tasks see all of the folder that a script lies in; "
            "move it to a folder of its own"
        )
    if folder.is_relative_to(runs_dir.resolve()):
        raise UsageError(
            f"--script {name!r} lies in the folder of the runs, {runs_dir}; copy it to a folder of its own"
        )
    return script


def lay_out(payload: Payload, run: RunFolder, spec: ClusterSpec, seen_at: Path | None = None) -> None:
    """Make each task a folder to run the script in: `work/TASK`, with a link to each entry of the script's folder.

    So the script finds what it reads beside itself, and what it writes lands in the run's folder. What is there
    already stays.

    Args:
        payload: with the script; without one there is nothing to do.
        run: whose tasks.
        spec: the cluster.
        seen_at: where the tasks see the script's folder; None: where it lies.
    """
    if payload.script is None:
        return
    folder = payload.script.parent
    for task in spec.tasks:
        work = run.work(task.name)
        make_folder(work)  # not through a link that an earlier run of the script left
        for name in _entries(folder, run.path.resolve()):
            link = work / name
            if link.is_symlink():
                link.unlink()
            if not link.exists():
                link.symlink_to((seen_at or folder) / name)


def _entries(folder: Path, run: Path) -> Iterator[str]:
    """Yield the names to link to: all but the one that holds the run, in which a walk would go round for ever."""
    for entry in folder.iterdir():
        if not run.is_relative_to(os.path.realpath(entry)):
            yield entry.name
