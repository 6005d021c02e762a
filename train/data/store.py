"""The files of a data folder, which are written atomically, checked, and written by one process at a time.

Standard library only: finding and verifying prepared data needs neither NumPy nor TensorFlow.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cluster.system import files
from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from cluster.system.json_files import DISK_FULL, write_json

T = TypeVar("T")

BLOCK_BYTES = 4 << 20
"""Size of the blocks by which files are checked, see `train/data/blocks.py`; a file's last one may be smaller."""


def slug(name: str) -> str:
    """Return the name of a dataset for file names."""
    return name.replace(":", "-").replace("/", "-")


def path_of(data_dir: Path, kind: str, name: str, version: str) -> Path:
    """Return the path of one version of a dataset: `<data_dir>/<kind>/<name>-<version>`, which may not exist."""
    return data_dir / kind / f"{slug(name)}-{version}"


def pointer_of(data_dir: Path, kind: str, name: str) -> Path:
    """Return the file that names the newest version of a dataset, `<data_dir>/<kind>/<name>.json`."""
    return data_dir / kind / f"{slug(name)}.json"


def check_sizes(expected: Mapping[Path, tuple[int, str]], again: str) -> None:
    """Compare the sizes of files with the expected ones, in bytes, each with a reason."""
    for path, (size_bytes, why) in expected.items():
        size = path.stat().st_size if path.is_file() else 0
        if size != size_bytes:
            raise RunFailed(f"{path} has {size} bytes, expected {size_bytes}{why}; {again}")


def block_hashes(entry: Mapping[str, Any], size_bytes: int) -> tuple[int, ...]:
    """Return the hashes of a file's blocks from its entry in an index."""
    hashes = tuple(int(digits, 16) for digits in entry["blocks"].split())
    if len(hashes) != -(-size_bytes // BLOCK_BYTES):
        raise ValueError(f"{len(hashes)} blocks of {entry['file']}")
    return hashes


def verify_files(expected: Mapping[Path, str], again: str, say: Callable[[str], None]) -> None:
    """Recompute the sha256 of files and report a line for each. A missing file is reported without an error."""
    differing = []
    for path, digest in expected.items():
        if not path.exists():
            say(f"gone      {path} (not needed to train)")
        elif files.sha256(path) == digest:
            say(f"ok        {path}")
        else:
            say(f"DIFFERENT {path}")
            differing.append(str(path))
    if differing:
        raise RunFailed(f"{', '.join(differing)}: changed since they were prepared; {again}")


def read_index(path: Path, parse: Callable[[Any], T], missing: str, again: str) -> T:
    """Return a parsed index; report a missing one by the message `missing`, an unreadable one with the fix `again`."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise PrerequisiteError(missing) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"{path} cannot be read ({error!r}); {again}") from None


def read_pointer(data_dir: Path, kind: str, name: str, command: str) -> str:
    """Return the newest version of a dataset from its pointer file, `{"version": ...}`."""
    path = pointer_of(data_dir, kind, name)
    missing = f"{name} is not prepared: there is no {path}; run `{command}`"
    return read_index(path, lambda index: str(index["version"]), missing, f"run `{command}`")


def write_pointer(data_dir: Path, kind: str, name: str, version: str) -> None:
    """Make a version the newest one of a dataset, atomically."""
    write_json(pointer_of(data_dir, kind, name), {"version": version})


@contextlib.contextmanager
def scratch_folder(data_dir: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder, and delete it afterwards; also delete the files of a killed process."""
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
    """Yield a folder for a version of a dataset, which one rename puts in its place when it is complete."""
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
def lock(data_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock `data_dir` for one process that prepares data. The system releases the lock of a process that dies."""
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
                f"the disk of {data_dir} is full ({error.strerror}); free space there or use another folder: --data-dir"
            ) from None
        raise UsageError(
            f"{error.filename or data_dir} cannot be used ({error.strerror}); name another folder: --data-dir"
        ) from None
