"""Prepare a dataset once, from the first source that has it; afterwards nothing here needs a network.

Sources, in order:
    1. arrays that are prepared already;
    2. a TFDS dataset that is in the data folder already;
    3. the addresses that TFDS records;
    4. Debian's package (Fashion-MNIST).
What 3 and 4 fetch must have the sha256 that TFDS records, and goes through the real TFDS builder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster.errors import PrerequisiteError, RunFailed, UsageError
from train.data import arrays, debian, download
from train.data.download import SourceFile

if TYPE_CHECKING:
    import numpy as np

NEEDED_BYTES = 400_000_000
"""Free disk space to start with: Fashion-MNIST takes 90 MB in the end, 300 MB on the way."""

Say = Callable[[str], None]
Fetch = Callable[[str, Sequence[SourceFile], Path, Say], None]
FETCHERS: Mapping[str, Fetch] = {"TFDS download": download.fetch, "Debian package": debian.fetch}


class Dataset(Protocol):
    """What this module asks of `train.data.tfds_dataset.TfdsDataset`."""

    def source_files(self) -> tuple[SourceFile, ...]: ...
    def build(self, sources: Path, scratch: Path) -> None: ...
    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]: ...
    def files(self) -> tuple[Path, ...]: ...


def prepare(
    name: str,
    data_dir: Path,
    fresh: bool = False,
    *,
    open_dataset: Callable[[str, str, Path], Dataset] | None = None,
    fetchers: Mapping[str, Fetch] = FETCHERS,
) -> arrays.ArraySet:
    """Return the arrays of the dataset `name` in `data_dir`, preparing them where they are not.

    Processes that call this at once wait for the first; the others find its arrays.

    Args:
        fresh: decode again what is prepared already. Intact TFDS files are used, damaged ones are replaced.
        open_dataset: instead of `TfdsDataset`, for tests.
        fetchers: the sources of the files that TFDS builds from, tried in order.

    Raises:
        UsageError: no dataset of this name is known, or `data_dir` cannot be written.
        PrerequisiteError: no source has it; says why each failed.
        RunFailed: arrays that are there are damaged and `fresh` was not asked for, or the disk is full.
    """
    arrays.version_of(name)
    with contextlib.suppress(PrerequisiteError):
        if not fresh:
            return arrays.find(data_dir, name)
    with _disk_errors(data_dir), _lock(data_dir):
        with contextlib.suppress(PrerequisiteError):
            if not fresh:  # another process may have prepared them while this one waited
                return arrays.find(data_dir, name)
        free_bytes = shutil.disk_usage(data_dir).free
        if free_bytes < NEEDED_BYTES:
            raise OSError(errno.ENOSPC, f"{free_bytes / 1e6:.0f} MB free")
        return _prepare(name, data_dir, open_dataset or _tfds_dataset(), fetchers)


def say(message: str) -> None:
    """Print a line of progress at once, also into a pipe."""
    print(f"data: {message}", flush=True)


def _prepare(
    name: str,
    data_dir: Path,
    open_dataset: Callable[[str, str, Path], Dataset],
    fetchers: Mapping[str, Fetch],
) -> arrays.ArraySet:
    version, started = arrays.version_of(name), time.monotonic()
    say(f"preparing {name} {version} in {data_dir}")
    dataset = open_dataset(name, version, data_dir)
    with _scratch(data_dir / f".{name}.partial") as scratch:
        source, (classes, splits) = _decode_first(name, dataset, fetchers, scratch, data_dir)
        source_files = {str(path.relative_to(data_dir)): arrays.sha256(path) for path in dataset.files()}
        array_set = arrays.write(
            scratch, data_dir, name, classes=classes, splits=splits, source=source, source_files=source_files
        )
    for split in (array_set.train, array_set.test):
        say(f"wrote {split.images.path} {list(split.images.shape)} and its labels")
    say(f"{name} is ready, from: {source} ({time.monotonic() - started:.0f} s)")
    return array_set


def _decode_first(
    name: str, dataset: Dataset, fetchers: Mapping[str, Fetch], scratch: Path, data_dir: Path
) -> tuple[str, tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]]:
    """Return the first source that works, and what `dataset` decodes to with it."""
    attempts: dict[str, Fetch | None] = {"TFDS dataset in place": None, **fetchers}
    failures = []
    for source, fetch in attempts.items():
        try:
            if fetch is not None:
                _build(name, dataset, fetch, scratch)
            return source, dataset.decode()
        except PrerequisiteError as error:
            failures.append(f"{source}: {error}")
            say(failures[-1])
    raise PrerequisiteError(
        f"no source has {name} {arrays.version_of(name)}: {'; '.join(failures)}. Connect this machine to one of them, "
        f"or copy the folder {arrays.folder_of(data_dir, name)} from a machine that has it."
    )


def _build(name: str, dataset: Dataset, fetch: Fetch, scratch: Path) -> None:
    """Fetch the files that `dataset` is built from, check them, build it."""
    files = dataset.source_files()
    sources = scratch / "sources"
    shutil.rmtree(sources, ignore_errors=True)  # what a source before this one left behind
    sources.mkdir()
    fetch(name, files, sources, say)
    wrong = [file.name for file in files if arrays.sha256(sources / file.name) != file.sha256]
    if wrong:
        raise PrerequisiteError(f"{', '.join(wrong)} not with the sha256 that TFDS records")
    say(f"{len(files)} files have the sha256 that TFDS records; TFDS builds {name} from them (about 20 s)")
    dataset.build(sources, scratch)


def _tfds_dataset() -> Callable[[str, str, Path], Dataset]:
    from train.data.tfds_dataset import TfdsDataset  # imports TensorFlow: only once there is something to prepare

    return TfdsDataset


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is gone afterwards, together with what a killed process left in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(data_dir: Path) -> Iterator[None]:
    """Let one process at a time prepare data in `data_dir`. The system frees the lock of a process that dies."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / ".prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process prepares data in {data_dir}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors(data_dir: Path) -> Iterator[None]:
    """Say in one line that `data_dir` is full or cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"the disk of {data_dir} is full ({error.strerror}); "
                f"free {NEEDED_BYTES / 1e6:.0f} MB there or use another folder: --data-dir"
            ) from None
        raise UsageError(
            f"{error.filename or data_dir} cannot be used ({error.strerror}); name another folder: --data-dir"
        ) from None
