"""The user's files of a run: the script that every task runs, and the initial weights.

Weights are located before anything starts and copied to the run folder. So every task can read them wherever it runs,
and so can a repetition of the run after the original files are gone.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster.contract import settings
from cluster.contract.recovery.checkpoint_files import find_newest_good
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec
from cluster.host.launch.folders import find_run
from cluster.host.runtime.payload import Payload
from cluster.system import files
from cluster.system.errors import RunFailed, UsageError

WEIGHT_SUFFIXES = (".index", ".npz", ".h5", ".keras")
"""The suffixes of weight files that `train/model/initial_weights.py` can read."""


def find_weights(name: str, previous: RunFolder | None = None) -> tuple[Path, ...]:
    """Return the weight files of a run's newest intact checkpoint, or those of a file; none without a name.

    For a repetition of `previous`, return the copies in its folder. Raises UsageError if there are no weights.
    """
    if not name:
        return ()
    if previous is not None:
        return _inside(previous.init)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in WEIGHT_SUFFIXES:
            raise UsageError(f"--init-from {name}: expected a run, or a file that ends in {', '.join(WEIGHT_SUFFIXES)}")
        parts = sorted(path.parent.glob(f"{path.stem}.data-*")) if path.suffix == ".index" else []
        return (path.absolute(), *(part.absolute() for part in parts))
    if path.suffix in WEIGHT_SUFFIXES or "/" in name:
        raise UsageError(f"--init-from {name}: there is no such file; expected a run, or a file with weights")
    if saved := find_newest_good(find_run(name).checkpoints, lambda line: None):
        return tuple(sorted(saved.folder / Path(file).name for file in saved.files))
    raise UsageError(f"--init-from {name}: the run has no intact checkpoint; name another run, or a file with weights")


def copy_weights(found: Sequence[Path], folder: Path) -> None:
    """Copy the files to a run's folder; raise RunFailed if one has been deleted since it was found."""
    if found:
        folder.mkdir()
    for path in found:
        try:
            shutil.copyfile(path, folder / path.name)
        except FileNotFoundError:
            raise RunFailed(f"--init-from: {path} has just been deleted; try again") from None


def hash_weights(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file of a run's initial weights."""
    return {path.name: files.sha256(path) for path in _inside(folder)}


def _inside(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*"))) if folder.is_dir() else ()


def check_path(option: str, name: str) -> None:
    """Check that a path has no control characters; raise UsageError otherwise."""
    if not name.isprintable():
        raise UsageError(f"--{option} {name!r}: a path without control characters is expected; rename that file")


def check_script(name: str, runs_dir: Path) -> Path:
    """Return the script's path; raise UsageError if it is unreadable, or its folder must not be shared with tasks."""
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
        problem = f"lies in {shared[folder]}, and tasks see all of the folder that a script lies in"
        raise UsageError(f"--script {name!r} {problem}; move it to a separate folder")
    if folder.is_relative_to(runs_dir.resolve()):
        raise UsageError(f"--script {name!r} lies in the folder of the runs, {runs_dir}; copy it to a separate folder")
    return script


def lay_out(payload: Payload, run: RunFolder, spec: ClusterSpec, seen_at: Path | None = None) -> None:
    """Create each task's working folder, `work/TASK`, with a link to each entry of the script's folder.

    So the script finds its files next to itself, and its output is written to the run folder. Existing files stay.
    `seen_at` is the path at which tasks see the script's folder; None for its own path.
    """
    if payload.script is None:
        return
    folder = payload.script.parent
    for task in spec.tasks:
        work = run.work(task.name)
        files.make_folder(work)  # does not follow a link that an earlier attempt of the script may have left
        for entry in folder.iterdir():
            if run.path.resolve().is_relative_to(os.path.realpath(entry)):
                continue  # it contains the run: walking through the link would not terminate
            link = work / entry.name
            if link.is_symlink():
                link.unlink()
            if not link.exists():
                link.symlink_to((seen_at or folder) / entry.name)
