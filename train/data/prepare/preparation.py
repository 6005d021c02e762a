"""Prepares a dataset once, from the first source that has it; afterwards no network is needed.

Sources of a TFDS dataset, in order:
    1. prepared arrays;
    2. a TFDS dataset in the data folder;
    3. the addresses that TFDS records;
    4. Debian's package (Fashion-MNIST, the Jargon File).
Files from 3 and 4 must have the sha256 that TFDS records, and TFDS builds the dataset from them.

The Jargon File is not in TFDS: source 3 does not apply, and `train.data.prepare.jargon_file` records its sha256.

A user's dataset, `package.module:function`, has one source: the function, which is called every time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.system import terminal
from cluster.system.errors import PrerequisiteError, RunFailed
from cluster.system.files import sha256
from train import named
from train.data import store
from train.data.dataset_record import DTYPES, ArrayRecord, is_user_dataset, values_in
from train.data.prepare import download
from train.data.prepare.download import SourceFile
from train.data.store import say
from train.named import Named

if TYPE_CHECKING:
    import numpy as np

    from train.data.prepare.jargon_file import JargonFile
    from train.data.prepare.tfds_datasets import TfdsDataset

Fetch = Callable[[str, Sequence[SourceFile], Path], None]
FETCHERS: Mapping[str, Fetch] = {
    "TFDS download": download.fetch_from_tfds,
    "Debian package": download.fetch_from_debian,
}


def prepare_dataset(name: str, data_dir: Path, fresh: bool = False) -> ArrayRecord:
    """Return the arrays of a dataset in `data_dir`; prepare them if necessary.

    Of several processes that call this at the same time, one prepares the arrays and the others wait. With `fresh`,
    prepared data is decoded again: intact TFDS files are used, damaged ones are replaced. Raises PrerequisiteError,
    with the reason of each source, if no source has the dataset.
    """
    if is_user_dataset(name):
        return _prepare_user_dataset(name, data_dir, fresh)
    version = ArrayRecord.newest_version(data_dir, name)
    with contextlib.suppress(PrerequisiteError):
        if not fresh:
            return ArrayRecord.find(data_dir, name)
    with store.lock(data_dir):
        with contextlib.suppress(PrerequisiteError):
            if not fresh:  # another process may have prepared them while this one waited
                return ArrayRecord.find(data_dir, name, version)
        return _prepare(name, version, data_dir)


def _prepare_user_dataset(name: str, data_dir: Path, fresh: bool) -> ArrayRecord:
    from train.data import user_dataset  # imports NumPy

    say(f"calling {name}")
    dataset = user_dataset.read_dataset(name)
    with store.lock(data_dir):
        if not fresh:
            with contextlib.suppress(PrerequisiteError, RunFailed):  # damaged arrays are written again
                record = ArrayRecord.find(data_dir, name, dataset.version)
                store.write_pointer(data_dir, "arrays", name, dataset.version)
                return record
        made = {"classes": dataset.classes, "source": f"calling {name}"}
        return write_arrays(data_dir, name, dataset.version, dataset.splits, **made)


def _prepare(name: str, version: str, data_dir: Path) -> ArrayRecord:
    started = time.monotonic()
    say(f"preparing {name} {version} in {data_dir}")
    dataset = _dataset_class(name)(name, version, data_dir)
    with store.scratch_folder(data_dir, name) as scratch:
        folder = store.path_of(data_dir, "arrays", name, version)
        attempts: dict[str, Fetch | None] = {"TFDS dataset in place": None, **FETCHERS}
        failures = []
        for source, fetch in attempts.items():
            try:
                if fetch is not None:
                    _build(name, dataset, fetch, scratch)
                classes, splits = dataset.decode()
                break
            except PrerequisiteError as error:
                failures.append(f"{source}: {error}")
                say(failures[-1])
        else:
            raise PrerequisiteError(
                f"no source has {folder.name}: {'; '.join(failures)}. Connect this machine to one of them, "
                f"or copy the folder {folder} from a machine that has it."
            )
    files = {str(path.relative_to(data_dir)): sha256(path) for path in dataset.files()}
    record = write_arrays(data_dir, name, version, splits, classes=classes, source=source, source_files=files)
    for split in record.splits.values():
        file, leaf = split.files[0], split.leaves[0]
        say(f"wrote {file.path} {[file.num_examples, *leaf.shape]} and its labels")
    say(f"{name} is ready, from: {source} ({time.monotonic() - started:.0f} s)")
    return record


def _build(name: str, dataset: JargonFile | TfdsDataset, fetch: Fetch, scratch: Path) -> None:
    files = dataset.source_files()
    sources = scratch / "sources"
    shutil.rmtree(sources, ignore_errors=True)  # files of an earlier source
    sources.mkdir()
    fetch(name, files, sources)
    if wrong := [file.name for file in files if sha256(sources / file.name) != file.sha256]:
        raise PrerequisiteError(f"{', '.join(wrong)} not with the recorded sha256")
    say(f"{len(files)} files have the recorded sha256; building {name} from them (20 s with TFDS)")
    dataset.build(sources, scratch)


def write_arrays(
    data_dir: Path,
    name: str,
    version: str,
    splits: Mapping[str, tuple[Named, ...]],
    *,
    classes: Named = (),
    source: str = "",
    source_files: Mapping[str, str] | None = None,
) -> ArrayRecord:
    """Write the arrays of a dataset in place of earlier ones; return their record. An interrupted call leaves nothing.

    `splits` has features, labels and optional weights of "train" and "test", see `Split`. `source` describes their
    origin, only in the record's JSON. For the other arguments see `ArrayRecord`.
    """
    index: dict[str, Any] = {"name": name, "version": version, "classes": classes}

    def count_outputs(classes: tuple[str, ...], *labels: np.ndarray) -> int:
        if labels[0].dtype.kind == "f":
            return values_in(labels[0].shape[1:])
        return len(classes) or 1 + max(int(array.max()) for array in labels)

    num_outputs = named.each(count_outputs, classes, *(arrays[1] for arrays in splits.values()))
    index |= {"num_outputs": num_outputs, "source": source, "source_files": dict(source_files or {})}
    with store.new_folder(data_dir, "arrays", name, version) as folder:
        index["splits"] = {
            split: {
                part: _write_part(folder / f"{split}_{part}.bin", part_arrays, DTYPES[part])
                for part, part_arrays in zip(DTYPES, arrays, strict=False)  # weights may be missing
            }
            for split, arrays in splits.items()
        }
        (folder / "arrays.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if is_user_dataset(name):
        store.write_pointer(data_dir, "arrays", name, version)
    return ArrayRecord.find(data_dir, name, version)


def _write_part(path: Path, array: Named, dtypes: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(array, Mapping):
        return {name: _write_part(path.with_stem(f"{path.stem}_{name}"), item, dtypes) for name, item in array.items()}
    from train.data import blocks  # imports TensorFlow

    if array.dtype.name not in dtypes:
        raise ValueError(f"{path.name} must be {' or '.join(dtypes)}, not {array.dtype}")
    array.astype(array.dtype.newbyteorder("<"), order="C", copy=False).tofile(path)
    return {"file": path.name, "shape": array.shape, "dtype": array.dtype.name, **blocks.digests(path)}


def _dataset_class(name: str) -> type[JargonFile] | type[TfdsDataset]:
    from train.data.prepare import jargon_file  # imports NumPy

    if name == jargon_file.NAME:
        return jargon_file.JargonFile
    with terminal.quiet_imports():  # imports TensorFlow
        from train.data.prepare.tfds_datasets import TfdsDataset

    return TfdsDataset
