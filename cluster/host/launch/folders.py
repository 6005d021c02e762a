"""The folders of runs and data, the lookup of runs by name, and the check of a folder before a start."""

import itertools
import os
from pathlib import Path

from cluster.contract import settings, spec
from cluster.contract.run import claim
from cluster.contract.run.folder import RunFolder
from cluster.host.launch.teardown import in_progress
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import COMMAND, short_path

MIN_FREE_BYTES = 512 * 2**20
"""Free disk space that a run needs to start, for its checkpoints, logs and export."""


def runs_dir() -> Path:
    """Return the folder of all runs: RUNS_DIR, or `runs` in this checkout."""
    return settings.folder("RUNS_DIR", "runs")


def data_dir() -> Path:
    """Return the folder of prepared data: DATA_DIR, or `data` in this checkout."""
    return settings.folder("DATA_DIR", "data")


def find_run(name: str = "") -> RunFolder:
    """Return the run called `name`, by default the current one; raise UsageError if there is none."""
    current = runs_dir() / ".current"
    if not name:
        name = current.read_text().strip() if current.exists() else ""
        if not name or not (runs_dir() / name).exists():
            where = short_path(runs_dir())
            raise UsageError(f"there is no current run; start one with `{COMMAND} up`, or name one of {where}/")
    run = RunFolder(runs_dir() / spec.check_run_name(name))
    if not run.cluster.exists() or run.incomplete:
        known = [path.parent.name for path in runs_dir().glob("*/cluster.json")]
        raise UsageError(f"there is no run {name!r} in {short_path(runs_dir())}{nearest(name, known) if known else ''}")
    return run


def free_folder(name: str) -> RunFolder:
    """Return the first of `name`, `name-2`, `name-3` and so on that is neither a run nor claimed for one."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (RunFolder(runs_dir() / candidate) for candidate in names)
    free = (run for run in folders if run.incomplete or not os.path.lexists(run.path))
    return next(run for run in free if not claim.is_held(run))


def check_folder(run: RunFolder, *, resumes: bool, replaces: bool) -> None:
    """Check that a run can be started in its folder. The result is reliable only for the holder of the claim."""
    name = run.name
    if not os.path.lexists(run.path) or (run.incomplete and not claim.is_held(run)):
        return
    if not resumes and not replaces:
        again = f"or start it again with --name {name} --fresh"
        raise claim.Taken(f"run {name!r} exists; resume it with --resume {name}, {again}")
    if replaces and run.path.is_symlink():
        link = f"{short_path(run.path)} is a link to {str(run.path.readlink())!r}"
        raise UsageError(f"--name {name}: {link}, which is not replaced; remove it, or choose another --name")
    if in_progress(run):
        if resumes:
            raise UsageError(f"run {name!r} is still in progress; `{COMMAND} stop` it before it can be resumed")
        raise UsageError(f"run {name!r} is still in progress; `{COMMAND} down {name}` before it is started again")
