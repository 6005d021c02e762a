"""The record of a dataset function that was examined before the run started, in a JSON file.

    <data_dir>/functions/<name>.json             which record is the newest
    <data_dir>/functions/<name>-<version>.json   the record

Every task compares the function's result with it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from train.data.prepare import store

RANDOM_ACCESS, DATASET = "random access", "tf.data.Dataset"
PARTS = ("features", "labels", "weights")


@dataclass(frozen=True)
class Record:
    """A dataset function.

    Attributes:
        name: `package.module:function`.
        form: the form of its result, `RANDOM_ACCESS` or `DATASET`.
        example: `{"shape": [...], "dtype": ...}`, or a dictionary of these, for each of `PARTS` of an example.
        num_outputs: number of classes or of values to predict; a dictionary if labels are one.
        counts: number of examples of each split.
        counted: whether the examples were counted, because the datasets do not know their length.
    """

    name: str
    form: str
    example: Mapping[str, Any]
    num_outputs: Any
    counts: Mapping[str, int]
    counted: bool = False

    @property
    def version(self) -> str:
        """The first 12 digits of the sha256 of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def random_access(self) -> bool:
        """Whether any example can be read by its number."""
        return self.form == RANDOM_ACCESS

    def __str__(self) -> str:
        features = leaves(self.example["features"])
        shapes = ", ".join(f"{leaf['shape']} {leaf['dtype']}" for leaf in features)
        counted = " (counted)" if self.counted else ""
        return (
            f"{self.name} {self.version}: {self.counts['train']} examples to train, {self.counts['test']} to test"
            f"{counted}, each {shapes}, read by each task by {self.form}"
        )


def is_leaf(described: Mapping[str, Any]) -> bool:
    """Whether a description is that of one array; a dictionary of arrays may have one with the name `shape`."""
    return isinstance(described.get("shape"), list)


def leaves(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the descriptions of the arrays of a part of an example."""
    return [described] if is_leaf(described) else list(described.values())


def of_each(described: Mapping[str, Any], key: str) -> Any:
    """Return `shape`, as a tuple, or `dtype` of the array or of each array of a part of an example."""
    if is_leaf(described):
        return tuple(described[key]) if key == "shape" else described[key]
    return {name: of_each(leaf, key) for name, leaf in described.items()}


def find(data_dir: Path, name: str, version: str = "") -> Record:
    """Find the record of a dataset function.

    Args:
        name: `package.module:function`.
        version: the version; empty for the newest.
    """
    command = f"invoke data.examine --name {name}"
    version = version or store.read_pointer(_pointer(data_dir, name), name, command)
    path = _path(data_dir, name, version)
    with store.index_errors(path, f"{name} {version} was not examined in {data_dir}; run `{command}`", command):
        return Record(**json.loads(path.read_text(encoding="utf-8")))


def write(data_dir: Path, record: Record) -> None:
    """Write a record as the newest of its function."""
    name, version = record.name, record.version
    folder = data_dir / "functions"
    folder.mkdir(exist_ok=True)
    with store.scratch_folder(data_dir / f".{store.slug(name)}.partial") as scratch:
        written = scratch / "record.json"
        written.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        written.replace(_path(data_dir, name, version))
        store.write_pointer(_pointer(data_dir, name), version, scratch)


def _path(data_dir: Path, name: str, version: str) -> Path:
    return data_dir / "functions" / f"{store.slug(name)}-{version}.json"


def _pointer(data_dir: Path, name: str) -> Path:
    return data_dir / "functions" / f"{store.slug(name)}.json"
