"""The prepared form of a dataset that fits in memory: raw arrays on disk, which every task reads quickly.

    <data_dir>/arrays/<name>-<version>/
        arrays.json  train_features.bin  train_labels.bin  [train_weights.bin]  test_features.bin  test_labels.bin ...

Arrays are in C order, little endian, without a header. Tasks read them inside their graph
(`train.data.feeds.load_examples`), as remote parameter-server workers must. That takes 0.1 s; decoding TFDS's 60,000
PNGs would take 5 s at every start of every task.

A dataset is named either as in TFDS or as a user's `package.module:function`, in which case its version is a hash of
its contents.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.system.errors import UsageError, nearest
from train import named
from train.data import store
from train.data.dataset_record import (
    DTYPES,
    DataFile,
    DatasetRecord,
    Leaf,
    Split,
    is_user_dataset,
    parse_part,
    values_in,
)
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
"""Bytes per prepared example of a text; training cuts them into contexts."""

TEXTS = ("jargon_file",)
"""Text datasets: features are bytes, and labels the bytes that follow."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecord(DatasetRecord):
    """A dataset in arrays; each file of a split holds one of its `leaves`, for all examples."""

    kind = "arrays"

    @classmethod
    def newest_version(cls, data_dir: Path, name: str) -> str:
        """Return the version to use: the known one of a TFDS dataset, or the newest prepared one of a user's."""
        if is_user_dataset(name):
            return super().newest_version(data_dir, name)
        if name not in VERSIONS:
            raise UsageError(f"unknown dataset {name!r}{nearest(name, VERSIONS)}, or your own package.module:function")
        return VERSIONS[name]

    @classmethod
    def parse_split(cls, folder: Path, value: Mapping[str, Any], split: str) -> Split:
        files = []

        def array(entry: Mapping[str, Any]) -> Leaf:
            count, *shape = entry["shape"]
            leaf = Leaf(tuple(shape), entry["dtype"])
            files.append(DataFile.from_entry(folder, entry, count, count * leaf.size_bytes))
            return leaf

        example = {name: parse_part(part, array) for name, part in value["splits"][split].items()}
        return Split(files[0].num_examples, example, tuple(files))

    def cut(self, context: int) -> ArrayRecord:
        """Return a text dataset cut to examples of `context` bytes, a divisor of `WINDOW`; other datasets unchanged."""
        if self.name not in TEXTS:
            return self

        def shorter(split: Split) -> Split:
            (window,) = split.example["features"].shape
            example = {name: Leaf((context,), leaf.dtype) for name, leaf in split.example.items()}
            return dataclasses.replace(split, num_examples=split.num_examples * window // context, example=example)

        return dataclasses.replace(self, train=shorter(self.train), test=shorter(self.test))


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
    labels = [arrays[1] for arrays in splits.values()]
    index: dict[str, Any] = {"name": name, "version": version, "classes": classes}
    num_outputs = named.each(_num_outputs, classes, *labels)
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


def _num_outputs(classes: tuple[str, ...], *labels: np.ndarray) -> int:
    if labels[0].dtype.kind == "f":
        return values_in(labels[0].shape[1:])
    return len(classes) or 1 + max(int(array.max()) for array in labels)


def _write_part(path: Path, array: Named, dtypes: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(array, Mapping):
        return {name: _write_part(path.with_stem(f"{path.stem}_{name}"), item, dtypes) for name, item in array.items()}
    from train.data import blocks  # imports TensorFlow

    if array.dtype.name not in dtypes:
        raise ValueError(f"{path.name} must be {' or '.join(dtypes)}, not {array.dtype}")
    data = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    data.tofile(path)
    return {"file": path.name, "shape": array.shape, "dtype": array.dtype.name, **blocks.digests(path)}
