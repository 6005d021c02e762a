"""The files of a data folder, which are written atomically, checked, and written by one process at a time.

Standard library only: finding and verifying prepared data needs neither NumPy nor TensorFlow.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cluster.system import files
from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from cluster.system.json_files import DISK_FULL, write_json
from cluster.system.terminal import print_lines
from train.settings import references

T = TypeVar("T")


def say(message: str) -> None:
    """Print a line of progress without buffering."""
    print_lines(f"data: {message}")


def slug(name: str) -> str:
    """Return the name of a dataset for file names."""
    return name.replace(":", "-").replace("/", "-")


def path_of(data_dir: Path, kind: str, name: str, version: str) -> Path:
    """Return the path of one version of a dataset: `<data_dir>/<kind>/<name>-<version>`, which may not exist."""
    return data_dir / kind / f"{slug(name)}-{version}"


def pointer_of(data_dir: Path, kind: str, name: str) -> Path:
    """Return the file that names the newest version of a dataset, `<data_dir>/<kind>/<name>.json`.

    The name of a user's dataset, such as data:data, means another one in each project, so the folder counts, too.
    """
    folder, suffix = None, ""
    with contextlib.suppress(ValueError):  # a module that was not imported from a file
        folder = references.code_dir(name)
    if folder:
        suffix = f"-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    return data_dir / kind / f"{slug(name)}{suffix}.json"


def read_index(path: Path, parse: Callable[[Any], T], missing: str, again: str) -> T:
    """Return a parsed index; raise an error with the message `missing`, or with the fix `again` if it is unreadable."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise PrerequisiteError(missing) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"{path} cannot be read ({error!r}); {again}") from None


def write_pointer(data_dir: Path, kind: str, name: str, version: str) -> None:
    """Make a version the newest one of a dataset, atomically; a file that names it already stays untouched."""
    path, value = pointer_of(data_dir, kind, name), {"version": version}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == value:
            return
    write_json(path, value)


@contextlib.contextmanager
def scratch_folder(data_dir: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder, without files that a killed process left in it, and delete it afterwards."""
    folder = data_dir / f".{slug(name)}.partial"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_folder(data_dir: Path, kind: str, name: str, version: str) -> Iterator[Path]:
    """Yield a scratch folder for a version of a dataset, and rename it into place once it is complete."""
    folder = path_of(data_dir, kind, name, version)
    with scratch_folder(data_dir, name) as scratch:
        partial = scratch / kind
        partial.mkdir()
        yield partial
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            os.replace(folder, scratch / "replaced")
        os.replace(partial, folder)


@contextlib.contextmanager
def lock(data_dir: Path) -> Iterator[None]:
    """Lock `data_dir` for a process that prepares data, as long as it lives, and report errors of its disk."""
    with disk_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        with (data_dir / ".prepare.lock").open("w") as file:
            if not files.lock(file.fileno(), 0.0):
                say(f"another process prepares data in {data_dir}; waiting for it")
                files.lock(file.fileno(), math.inf)
            yield


@contextlib.contextmanager
def disk_errors(data_dir: Path) -> Iterator[None]:
    """Report in one line that the disk of `data_dir` is full or cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise RunFailed(
                f"the disk of {data_dir} is full ({error.strerror}); free space, or set DATA_DIR to another disk"
            ) from None
        raise UsageError(
            f"{error.filename or data_dir} cannot be used ({error.strerror}); set DATA_DIR to another folder"
        ) from None
