"""Prepare a dataset once, from the first source that has it; afterwards nothing here needs a network.

Sources of a TFDS dataset, in order:
    1. arrays that are prepared already;
    2. a TFDS dataset that is in the data folder already;
    3. the addresses that TFDS records;
    4. Debian's package (Fashion-MNIST, the Jargon File, the table of breast cancers).
What 3 and 4 fetch must have the sha256 that TFDS records, and goes through the real TFDS builder.

A text (`train.data.prepare.text`) or a table (`train.data.prepare.table`) is no dataset of TFDS: 3 is left out, and its
sha256 is recorded here.

A dataset of the user's own, `package.module:function`, has one source: the function, which is called every time.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster.system import quiet
from cluster.system.errors import PrerequisiteError, RunFailed
from cluster.system.files import sha256
from cluster.system.terminal import print_lines
from train import named
from train.data import arrays
from train.data.prepare import debian, download, store
from train.data.prepare.download import SourceFile

if TYPE_CHECKING:
    import numpy as np

NEEDED_BYTES = 400_000_000
"""Free disk space to start with: Fashion-MNIST takes 90 MB in the end, 300 MB on the way."""

Say = Callable[[str], None]
Fetch = Callable[[str, Sequence[SourceFile], Path, Say], None]
FETCHERS: Mapping[str, Fetch] = {"TFDS download": download.fetch, "Debian package": debian.fetch}


class Dataset(Protocol):
    """What this module needs of `train.data.prepare.tfds_dataset.TfdsDataset`."""

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
        name: of a TFDS dataset, or `package.module:function`, see `train.data.own_dataset`.
        data_dir: what everything is below; made where it is not there.
        fresh: decode again what is prepared already. Intact TFDS files are used, damaged ones are replaced.
        open_dataset: instead of `TfdsDataset`, for tests.
        fetchers: the sources of the files that TFDS builds from, tried in order.

    Raises:
        UsageError: no dataset of this name is known, the function of the user's own fails or returns what cannot be
            trained on, or `data_dir` cannot be written.
        PrerequisiteError: no source has it; says why each failed.
        RunFailed: arrays that are there are damaged and `fresh` was not requested, or the disk is full.
    """
    if arrays.is_own(name):
        return _prepare_own(name, data_dir, fresh)
    version = arrays.newest(data_dir, name)
    with contextlib.suppress(PrerequisiteError):
        if not fresh:
            return arrays.find(data_dir, name)
    with store.disk_errors(data_dir), store.lock(data_dir, say):
        with contextlib.suppress(PrerequisiteError):
            if not fresh:  # another process may have prepared them while this one waited
                return arrays.find(data_dir, name, version)
        store.check_space(data_dir, NEEDED_BYTES)
        return _prepare(name, version, data_dir, open_dataset or _dataset_class(name), fetchers)


def say(message: str) -> None:
    """Print a line of progress at once, also into a pipe."""
    print_lines(f"data: {message}")


def _prepare_own(name: str, data_dir: Path, fresh: bool) -> arrays.ArraySet:
    """Call the user's function, and write what it returns unless that is there already."""
    from train.data import own_dataset  # imports NumPy

    say(f"calling {name}")
    dataset = own_dataset.read(name)
    partial = data_dir / f".{store.slug(name)}.partial"
    with store.disk_errors(data_dir), store.lock(data_dir, say), store.scratch_folder(partial) as scratch:
        if not fresh:
            # Damaged arrays are no reason to stop here: what they should be is at hand.
            with contextlib.suppress(PrerequisiteError, RunFailed):
                found = arrays.find(data_dir, name, dataset.version)
                store.write_pointer(arrays.pointer_of(data_dir, name), dataset.version, scratch)
                return found
        store.check_space(data_dir, dataset.size_bytes)
        return arrays.write(
            scratch,
            data_dir,
            name,
            dataset.version,
            classes=dataset.classes,
            splits=dataset.splits,
            source=f"calling {name}",
            source_files={},
        )


def _prepare(
    name: str,
    version: str,
    data_dir: Path,
    open_dataset: Callable[[str, str, Path], Dataset],
    fetchers: Mapping[str, Fetch],
) -> arrays.ArraySet:
    started = time.monotonic()
    say(f"preparing {name} {version} in {data_dir}")
    dataset = open_dataset(name, version, data_dir)
    with store.scratch_folder(data_dir / f".{name}.partial") as scratch:
        folder = arrays.folder_of(data_dir, name, version)
        source, (classes, splits) = _decode_first(name, dataset, fetchers, scratch, folder)
        source_files = {str(path.relative_to(data_dir)): sha256(path) for path in dataset.files()}
        array_set = arrays.write(
            scratch, data_dir, name, version, classes=classes, splits=splits, source=source, source_files=source_files
        )
    for split in (array_set.train, array_set.test):
        for file in named.leaves(split.features):
            say(f"wrote {file.path} {list(file.shape)} and its labels")
    say(f"{name} is ready, from: {source} ({time.monotonic() - started:.0f} s)")
    return array_set


def _decode_first(
    name: str, dataset: Dataset, fetchers: Mapping[str, Fetch], scratch: Path, folder: Path
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
        f"no source has {folder.name}: {'; '.join(failures)}. Connect this machine to one of them, "
        f"or copy the folder {folder} from a machine that has it."
    )


def _build(name: str, dataset: Dataset, fetch: Fetch, scratch: Path) -> None:
    """Fetch the files that `dataset` is built from, check them, build it."""
    files = dataset.source_files()
    sources = scratch / "sources"
    shutil.rmtree(sources, ignore_errors=True)  # what a source before this one left behind
    sources.mkdir()
    fetch(name, files, sources, say)
    wrong = [file.name for file in files if sha256(sources / file.name) != file.sha256]
    if wrong:
        raise PrerequisiteError(f"{', '.join(wrong)} not with the recorded sha256")
    say(f"{len(files)} files have the recorded sha256; building {name} from them (20 s where TFDS does it)")
    dataset.build(sources, scratch)


def _dataset_class(name: str) -> Callable[[str, str, Path], Dataset]:
    from train.data.prepare import table, text  # imports NumPy

    if name in text.TEXTS:
        return text.TextDataset
    if name in table.TABLES:
        return table.TableDataset
    with quiet.imports():  # TensorFlow, only once there is something to prepare
        from train.data.prepare.tfds_dataset import TfdsDataset, TfdsReviews, TfdsText

    if name in text.TFDS_TEXTS:
        return TfdsText
    return TfdsReviews if name == "imdb_reviews" else TfdsDataset
