"""The tasks about this machine: what a bug report needs of it, and which runs take its disk."""

from __future__ import annotations

import sys
import time

from cluster.checks import environment
from cluster.cli.command_line import JSON_HELP, show, task
from cluster.control import cleaning
from cluster.errors import RunFailed, UsageError
from cluster.launch import folders
from cluster.messages import counted, size
from cluster.reports import listing
from cluster.view.columns import columns


@task(json=JSON_HELP)
def env(c, json=False):
    """Print one block to paste into a bug report: versions, engine, GPUs, limits; no secret and no user's name."""
    show(environment.look(), environment.lines, as_json=json)


@task(
    older="only runs that ended longer ago than this, such as 7d, 12h or 2w (default: none, it must be given)",
    yes="delete without asking (default: no)",
)
def clean(c, older="", yes=False):
    """Delete old runs: says which and how large they are, asks, and never touches a run in progress."""
    if not older:
        raise UsageError("--older is missing: say how old, such as invoke clean --older 7d")
    found = cleaning.find(folders.runs_dir(), cleaning.parse_age(older))
    if not found:
        print(f"no run has ended longer ago than {older}")
        return
    sizes = [listing.disk_bytes(old.run.path) for old in found]
    ages = [f"{listing.duration(time.time() - old.ended)} ago" for old in found]
    names = [old.run.name for old in found]
    print("\n".join(columns(zip(names, ages, map(size, sizes), strict=True), right=(1, 2))))
    question = f"delete {counted(len(found), 'run')} with checkpoints and logs, {size(sum(sizes))}? [y/N] "
    if not yes and not _agreed(question):
        raise UsageError("nothing was deleted; answer y, or add --yes")
    if left := cleaning.delete_all(found):
        raise RunFailed(f"{counted(len(left), 'run')} could not be deleted: {'; '.join(left)}")
    print(f"deleted {counted(len(found), 'run')}")


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clean asks before it deletes, and there is no terminal to ask on; add --yes")
    return input(question).strip().lower() in ("y", "yes")
