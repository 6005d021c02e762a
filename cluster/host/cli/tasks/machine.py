"""The tasks about this machine: what a bug report needs of it, and which runs take its disk."""

from __future__ import annotations

import sys
import time

from cluster.host.checks import bug_report
from cluster.host.cli.command_line import JSON_HELP, answer, show, task
from cluster.host.control import ending
from cluster.host.launch import folders
from cluster.host.reports import listing
from cluster.host.view.columns import columns
from cluster.system.errors import RunFailed, UsageError
from cluster.system.messages import counted, size


@task(json=JSON_HELP)
def env(c, json=False):
    """Print one block to paste into a bug report: versions, engine, GPUs, limits; no secret and no user's name."""
    show(bug_report.look(), bug_report.lines, as_json=json)


@task(
    "run",
    run="run to delete, however old it is (default: those of --older)",
    older="only runs that ended longer ago than this, such as 7d, 12h or 2w (default: none, a run must be named)",
    yes="delete without asking (default: no)",
)
def clean(c, run=None, older="", yes=False):
    """Delete a run, or all old runs: prints which and how large they are, asks, and never touches a run in progress."""
    if bool(run) == bool(older):
        raise UsageError("name a run, or say how old: invoke clean RUN, or invoke clean --older 7d")
    runs_dir = folders.runs_dir()
    found = [ending.find_ended(runs_dir, run)] if run else ending.find_old(runs_dir, ending.parse_age(older))
    if not found:
        print(f"no run has ended longer ago than {older}")
        return
    sizes = [listing.disk_bytes(old.run.path) for old in found]
    ages = [f"{listing.duration(time.time() - old.ended)} ago" for old in found]
    names = [old.run.name for old in found]
    print("\n".join(columns(zip(names, ages, map(size, sizes), strict=True), right=(1, 2))))
    question = f"delete {counted(len(found), 'run')} with checkpoints and logs, {size(sum(sizes))}? [y/N] "
    if not yes and not _agreed(question):
        print("nothing was deleted")
        return
    if left := ending.delete(found):
        raise RunFailed(f"{counted(len(left), 'run')} could not be deleted: {'; '.join(left)}")
    print(f"deleted {counted(len(found), 'run')}")


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clean asks before it deletes, and there is no terminal to ask on; add --yes")
    return answer(question) in ("y", "yes")
