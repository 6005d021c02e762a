"""The prepared form of a dataset that fits in memory: raw arrays on disk, read by every task in a moment.

    <data_dir>/arrays/<name>-<version>/
        arrays.json  train_images.bin  train_labels.bin  test_images.bin  test_labels.bin

Images are `[N, H, W, C] uint8`, labels `[N] int64`, in C order, little endian, without a header. A task reads them
inside its graph (`train.data.memory.load`), so a remote parameter-server worker can too. It takes 0.1 s, where decoding
TFDS's 60,000 PNGs takes 5 s at every start of every task. Standard library only: finding needs neither NumPy nor
TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import PrerequisiteError, RunFailed, UsageError, nearest

if TYPE_CHECKING:
    import numpy as np

VERSIONS = {"fashion_mnist": "3.0.1", "mnist": "3.0.1"}
"""The datasets known here and the TFDS version of each: another version may order its examples differently."""

INDEX = "arrays.json"
DTYPES = {"images": "uint8", "labels": "int64"}
_ITEM_BYTES = {"uint8": 1, "int64": 8}


@dataclass(frozen=True)
class ArrayFile:
    """One array on disk: raw bytes in C order, little endian."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def size_bytes(self) -> int:
        """What the file must have."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Split:
    """Examples to train on or to test on: images `[N, H, W, C] uint8`, labels `[N] int64`."""

    images: ArrayFile
    labels: ArrayFile

    @property
    def num_examples(self) -> int:
        """N."""
        return self.images.shape[0]


@dataclass(frozen=True)
class ArraySet:
    """A prepared dataset. `source_files` maps the TFDS files it was decoded from, below `data_dir`, to their sha256."""

    data_dir: Path
    name: str
    version: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    source: str
    source_files: Mapping[str, str]

    @property
    def num_classes(self) -> int:
        """Labels are 0 to one less than this."""
        return len(self.classes)

    @property
    def files(self) -> tuple[ArrayFile, ...]:
        """Every array on disk."""
        return (self.train.images, self.train.labels, self.test.images, self.test.labels)


def version_of(name: str) -> str:
    """Return the TFDS version of the dataset `name` that is used here.

    Raises:
        UsageError: no dataset of this name is known.
    """
    if name not in VERSIONS:
        raise UsageError(f"unknown dataset {name!r}{nearest(name, VERSIONS)}")
    return VERSIONS[name]


def folder_of(data_dir: Path, name: str) -> Path:
    """Return the folder of the arrays of the dataset `name`, there or not."""
    return data_dir / "arrays" / f"{name}-{version_of(name)}"


def find(data_dir: Path, name: str) -> ArraySet:
    """Return the arrays prepared for the dataset `name`, after comparing every file's size with its shape.

    Raises:
        UsageError: no dataset of this name is known.
        PrerequisiteError: it was never prepared in `data_dir`.
        RunFailed: a file is missing or has the wrong size, or the index cannot be read.
    """
    folder = folder_of(data_dir, name)
    again = f"run `invoke data.prepare --name {name} --fresh`"
    try:
        array_set = _from_index(data_dir, folder, json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise PrerequisiteError(
            f"{name} {version_of(name)} is not prepared in {data_dir}; run `invoke data.prepare --name {name}`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(f"{folder / INDEX} cannot be read ({error!r}); {again}") from None
    for file in array_set.files:
        size = file.path.stat().st_size if file.path.is_file() else 0
        if size != file.size_bytes:
            raise RunFailed(f"{file.path} has {size} bytes, expected {file.size_bytes} for {list(file.shape)}; {again}")
    return array_set


def write(
    scratch: Path,
    data_dir: Path,
    name: str,
    *,
    classes: tuple[str, ...],
    splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
    source: str,
    source_files: Mapping[str, str],
) -> ArraySet:
    """Write the arrays of the dataset `name` and return them, replacing those that were there before.

    They appear under their name in one rename: whatever kills this half way leaves none of it.

    Args:
        scratch: a folder on the disk of `data_dir`, for what is not complete yet.
        splits: for "train" and "test", images `[N, H, W, C] uint8` and labels `[N] int64`.
        source: where the data came from, in words.
        source_files: the files it was decoded from, below `data_dir`, and their sha256.
    """
    partial, folder = scratch / "arrays", folder_of(data_dir, name)
    partial.mkdir()
    index: dict[str, Any] = {"name": name, "version": version_of(name), "classes": classes, "num_classes": len(classes)}
    index |= {"source": source, "source_files": dict(source_files), "splits": {}}
    for split, arrays in splits.items():
        index["splits"][split] = {
            part: _write_array(partial / f"{split}_{part}.bin", array, dtype)
            for (part, dtype), array in zip(DTYPES.items(), arrays, strict=True)
        }
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        os.replace(folder, scratch / "replaced")
    os.replace(partial, folder)
    return find(data_dir, name)


def verify(array_set: ArraySet, say: Callable[[str], None] = print) -> None:
    """Recompute the sha256 of every array and of the TFDS files they came from, and say a line for each.

    TFDS files that are gone are no fault: training reads the arrays alone.

    Raises:
        RunFailed: naming the files whose bytes are not those that were prepared.
    """
    expected = {file.path: file.sha256 for file in array_set.files}
    expected |= {array_set.data_dir / name: digest for name, digest in array_set.source_files.items()}
    differing = []
    for path, digest in expected.items():
        if not path.exists():
            say(f"gone      {path} (not needed to train)")
        elif sha256(path) == digest:
            say(f"ok        {path}")
        else:
            say(f"DIFFERENT {path}")
            differing.append(str(path))
    if differing:
        raise RunFailed(
            f"{', '.join(differing)}: not the bytes that were prepared; "
            f"run `invoke data.prepare --name {array_set.name} --fresh`"
        )


def sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_array(path: Path, array: np.ndarray, dtype: str) -> dict[str, Any]:
    if array.dtype != dtype:
        raise ValueError(f"{path.name} must be {dtype}, not {array.dtype}")
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    path.write_bytes(data)
    return {"file": path.name, "shape": array.shape, "dtype": dtype, "sha256": hashlib.sha256(data).hexdigest()}


def _from_index(data_dir: Path, folder: Path, index: Mapping[str, Any]) -> ArraySet:
    def split(parts: Mapping[str, Any]) -> Split:
        return Split(
            *(
                ArrayFile(folder / parts[part]["file"], tuple(parts[part]["shape"]), dtype, parts[part]["sha256"])
                for part, dtype in DTYPES.items()
            )
        )

    return ArraySet(
        data_dir=data_dir,
        name=index["name"],
        version=index["version"],
        classes=tuple(index["classes"]),
        train=split(index["splits"]["train"]),
        test=split(index["splits"]["test"]),
        source=index["source"],
        source_files=index["source_files"],
    )
