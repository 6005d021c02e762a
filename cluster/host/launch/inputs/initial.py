"""The weights that a run begins with, `--init-from RUN|FILE`: found before anything starts, and copied to its folder.

So they are there for every task wherever it runs, and for whoever repeats the run when their origin is gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.host.launch.folders import find_run
from cluster.system import files
from cluster.system.errors import RunFailed, UsageError
from cluster.system.json_files import read_json

SUFFIXES = (".index", ".npz", ".h5", ".keras")
"""Of a file with weights; `train/model/initial_weights.py` reads them."""


def find(name: str, previous: RunFolder | None = None) -> tuple[Path, ...]:
    """Return the files with the weights that are named.

    Args:
        name: of a run, whose newest intact checkpoint is meant, or of a file; empty for none.
        previous: the run that is repeated: they are in its folder.

    Raises:
        UsageError: there is no such run or file, or it has no weights.
    """
    if not name:
        return ()
    if previous is not None:
        return _inside(previous.init)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UsageError(f"--init-from {name}: expected a run, or a file that ends in {', '.join(SUFFIXES)}")
        parts = sorted(path.parent.glob(f"{path.stem}.data-*")) if path.suffix == ".index" else []
        return (path.absolute(), *(part.absolute() for part in parts))
    if path.suffix in SUFFIXES or "/" in name:
        raise UsageError(f"--init-from {name}: there is no such file; expected a run, or a file with weights")
    run = find_run(name)
    for step in reversed(run.saved_steps):
        if found := _checkpoint(run, step):
            return found
    raise UsageError(f"--init-from {name}: the run has no intact checkpoint; name another run, or a file with weights")


def copy(found: Sequence[Path], folder: Path) -> None:
    """Copy the files to a run's folder.

    Raises:
        RunFailed: one has changed since it was found.
    """
    if found:
        folder.mkdir()
    for path in found:
        try:
            shutil.copyfile(path, folder / path.name)
        except FileNotFoundError:
            raise RunFailed(f"--init-from: {path} has just been deleted; try again") from None


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file with the weights that a run began with."""
    return {path.name: files.sha256(path) for path in _inside(folder)}


def _inside(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*"))) if folder.is_dir() else ()


def _checkpoint(run: RunFolder, step: int) -> tuple[Path, ...]:
    """Return the files of a finished checkpoint; none where one is not as its record says."""
    try:
        recorded = read_json(run.checkpoints / f"ckpt-{step}.json")["files"]
        paths = {run.checkpoints / Path(name).name: of["sha256"] for name, of in recorded.items()}
        if any(files.sha256(path) != digest for path, digest in paths.items()):
            return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    return tuple(sorted(paths))
