"""The prepared form of a dataset that fits in memory: raw arrays on disk, which every task reads quickly.

    <data_dir>/arrays/<name>-<version>/
        arrays.json  train_features.bin  train_labels.bin  [train_weights.bin]  test_features.bin  test_labels.bin ...

In C order, little endian, without a header. A task reads them inside its graph (`train.data.feeds.load_examples`), as
remote parameter-server workers must. It takes 0.1 s, where decoding TFDS's 60,000 PNGs takes 5 s at every start of
every task. Finding them needs only the standard library.

A dataset is one of TFDS, by its name, or the user's, named `package.module:function`. The version of the latter is a
hash of its contents, and `<data_dir>/arrays/<name>.json` names the newest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.system.errors import UsageError, nearest
from cluster.system.files import sha256
from cluster.system.messages import COMMAND
from train import named
from train.data import store
from train.named import Named

if TYPE_CHECKING:
    import numpy as np

VERSIONS = {
    "fashion_mnist": "3.0.1",
    "mnist": "3.0.1",
    "jargon_file": "4.4.7",
}
"""The known datasets and their versions; other versions may order their examples differently."""

WINDOW = 1024
"""Bytes of a prepared example of a text, which a training cuts into contexts."""

TEXTS = ("jargon_file",)
"""Datasets of the bytes of a text, whose labels are the following bytes."""

INDEX = "arrays.json"
DTYPES = {"features": ("uint8", "int32", "int64", "float32"), "labels": ("int64", "float32"), "weights": ("float32",)}
"""Possible types of each part of a split."""
STORED = {
    "bool": "uint8",
    "int8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "float16": "float32",
    "bfloat16": "float32",
    "float64": "float32",
}
"""The types in which features of other types are stored; only float64 loses precision."""
ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4}


@dataclass(frozen=True)
class ArrayFile:
    """One array on disk: raw bytes in C order, little endian."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    blocks: tuple[int, ...]
    """The hash of each block, see `train/data/blocks.py`."""

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Split:
    """Examples to train on or to test on.

    Features are `[N, ...]` uint8, int32, int64 or float32; labels `[N, ...]` int64 (classes) or float32 (quantities);
    weights of examples, if there are any, `[N] float32`. Several features or labels are dictionaries of such arrays,
    see `train/named.py`.
    """

    features: Named
    labels: Named
    weights: ArrayFile | None = None

    @property
    def num_examples(self) -> int:
        return int(named.leaves(self.features)[0].shape[0])

    @property
    def files(self) -> tuple[ArrayFile, ...]:
        parts = (self.features, self.labels, self.weights)
        return tuple(file for part in parts for file in named.leaves(part) if file is not None)


@dataclass(frozen=True)
class ArraySet:
    """A prepared dataset. `source_files` maps its original TFDS files, below `data_dir`, to their sha256."""

    data_dir: Path
    name: str
    version: str
    classes: Named
    """The names of the classes, a tuple; empty without names and for quantities."""
    num_outputs: Named
    """Number of classes; for quantities, their number per example."""
    train: Split
    test: Split
    source: str
    source_files: Mapping[str, str]

    @property
    def files(self) -> tuple[ArrayFile, ...]:
        return (*self.train.files, *self.test.files)

    @property
    def again(self) -> str:
        """What to do about damaged files."""
        return f"run `{COMMAND} data.prepare --name {self.name} --fresh`"

    def __str__(self) -> str:
        features = named.each(lambda file: f"{list(file.shape[1:])} {file.dtype}", self.train.features)
        labels = named.each(lambda file: file.dtype, self.train.labels)
        return describe_data(self, features, labels)

    def cut(self, context: int) -> ArraySet:
        """Return a text with examples of `context` bytes, a divisor of `WINDOW`, from the same files; others as is."""
        if self.name not in TEXTS:
            return self

        def shaped(file: ArrayFile) -> ArrayFile:
            return dataclasses.replace(file, shape=(math.prod(file.shape) // context, context))

        train, test = (Split(shaped(split.features), shaped(split.labels)) for split in (self.train, self.test))
        return dataclasses.replace(self, train=train, test=test)


def stored_dtype(subject: str, part: str, dtype: np.dtype[Any]) -> str:
    """Return the type in which an array of a part of a split, a key of `DTYPES`, is stored."""
    if part == "labels" and dtype.kind in "iub":
        return "int64"
    name = "float32" if part == "weights" and dtype.kind in "iub" else STORED.get(dtype.name, dtype.name)
    if name not in DTYPES[part]:
        text = dtype.kind in "OSUT"
        hint = "; turn text into whole numbers, see examples/text" if text else ""
        actual = "text or objects" if text else dtype.name
        raise UsageError(f"{subject} are {actual}; expected {' or '.join(DTYPES[part])}{hint}")
    return name


def values_in(shape: Sequence[int]) -> int:
    """Return the number of values that a model predicts for quantities, from the shape of an example's labels.

    With several axes it predicts the last axis at every position of the others.
    """
    return shape[-1] if shape else 1


def describe_data(data: Any, features: Named, label_dtypes: Named) -> str:
    """Describe prepared arrays or shards in a sentence."""

    def outputs(label_dtype: str, count: int) -> str:
        singular, plural = ("output", "outputs") if label_dtype == "float32" else ("class", "classes")
        return f"{count} {singular if count == 1 else plural}"

    def listed(value: Named) -> str:
        return ", ".join(f"{name.strip()} {item}".strip() for name, item in named.in_words(value).items())

    return (
        f"{data.name} {data.version}: {data.train.num_examples} examples to train, {data.test.num_examples} to test, "
        f"each {listed(features)}, {listed(named.each(outputs, label_dtypes, data.num_outputs))}"
    )


def size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the size of an array's file."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def is_user_dataset(name: str) -> bool:
    """Whether a name is a user's dataset, `package.module:function`."""
    return ":" in name


def newest_version(data_dir: Path, name: str) -> str:
    """Return the version of a dataset to use: the known one of TFDS, or the newest prepared one of the user's."""
    if is_user_dataset(name):
        return store.read_pointer(data_dir, "arrays", name, f"{COMMAND} data.prepare --name {name}")
    if name not in VERSIONS:
        raise UsageError(f"unknown dataset {name!r}{nearest(name, VERSIONS)}, or your own package.module:function")
    return VERSIONS[name]


def find_arrays(data_dir: Path, name: str, version: str = "") -> ArraySet:
    """Find the prepared arrays of a dataset, and compare every file's size with its shape."""
    version = version or newest_version(data_dir, name)
    folder = store.path_of(data_dir, "arrays", name, version)
    fix = f"copy {folder} from where it is" if is_user_dataset(name) else f"run `{COMMAND} data.prepare --name {name}`"
    again = f"run `{COMMAND} data.prepare --name {name} --fresh`"
    missing = f"{name} {version} is not prepared in {data_dir}; {fix}"
    array_set = store.read_index(folder / INDEX, partial(_from_index, data_dir, folder), missing, again)
    store.check_sizes({file.path: (file.size_bytes, f" for {list(file.shape)}") for file in array_set.files}, again)
    return array_set


def write_arrays(
    data_dir: Path,
    name: str,
    version: str,
    splits: Mapping[str, tuple[Named, ...]],
    *,
    classes: Named = (),
    source: str = "",
    source_files: Mapping[str, str] | None = None,
) -> ArraySet:
    """Write the arrays of a dataset, replacing earlier ones, and return them; an interrupted call leaves nothing.

    `splits` has features, labels and optional weights of "train" and "test", see `Split`; for others see `ArraySet`.
    """
    labels = [arrays[1] for arrays in splits.values()]
    index: dict[str, Any] = {"name": name, "version": version, "classes": classes}
    num_outputs = named.each(_num_outputs, classes, *labels)
    index |= {"num_outputs": num_outputs, "source": source, "source_files": dict(source_files or {})}
    with store.new_folder(data_dir, "arrays", name, version) as folder:
        index["splits"] = {
            split: {
                part: _write_part(folder, f"{split}_{part}", part_arrays, DTYPES[part])
                for part, part_arrays in zip(DTYPES, arrays, strict=False)  # weights may be missing
            }
            for split, arrays in splits.items()
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if is_user_dataset(name):
        store.write_pointer(data_dir, "arrays", name, version)
    return find_arrays(data_dir, name, version)


def verify_arrays(array_set: ArraySet, say: Callable[[str], None] = print) -> None:
    """Recompute the sha256 of every array and of its original TFDS files, and report a line for each.

    Original files may be missing, because training reads only the arrays.
    """
    expected = {file.path: file.sha256 for file in array_set.files}
    expected |= {array_set.data_dir / name: digest for name, digest in array_set.source_files.items()}
    store.verify_files(expected, array_set.again, say)


def _num_outputs(classes: tuple[str, ...], *labels: np.ndarray) -> int:
    if labels[0].dtype.kind == "f":
        return values_in(labels[0].shape[1:])
    return len(classes) or 1 + max(int(array.max()) for array in labels)


def _write_part(folder: Path, stem: str, arrays: Named, dtypes: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(arrays, Mapping):
        return {name: _write_array(folder / f"{stem}_{name}.bin", array, dtypes) for name, array in arrays.items()}
    return _write_array(folder / f"{stem}.bin", arrays, dtypes)


def _write_array(path: Path, array: np.ndarray, dtypes: tuple[str, ...]) -> dict[str, Any]:
    from train.data import blocks  # imports TensorFlow

    if array.dtype.name not in dtypes:
        raise ValueError(f"{path.name} must be {' or '.join(dtypes)}, not {array.dtype}")
    data = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    data.tofile(path)
    entry = {"file": path.name, "shape": array.shape, "dtype": array.dtype.name}
    return entry | {"sha256": sha256(path), "blocks": blocks.hashes_as_text(path)}


def _from_index(data_dir: Path, folder: Path, index: Mapping[str, Any]) -> ArraySet:
    def file(part: Mapping[str, Any]) -> ArrayFile:
        path, shape, dtype = folder / part["file"], tuple(part["shape"]), part["dtype"]
        hashes = store.block_hashes(part, size_bytes(shape, dtype))
        return ArrayFile(path, shape, dtype, part["sha256"], hashes)

    def split(parts: Mapping[str, Any]) -> Split:
        def files(part: Mapping[str, Any]) -> Named:
            several = not isinstance(part.get("file"), str)  # an array may have that name
            return {name: file(entry) for name, entry in part.items()} if several else file(part)

        return Split(**{name: files(part) for name, part in parts.items()})

    return ArraySet(
        data_dir=data_dir,
        name=index["name"],
        version=index["version"],
        classes=named.each(tuple, index["classes"]),
        num_outputs=index["num_outputs"],
        train=split(index["splits"]["train"]),
        test=split(index["splits"]["test"]),
        source=index["source"],
        source_files=index["source_files"],
    )
