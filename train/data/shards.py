"""The prepared form of a dataset that does not fit in memory: TFRecord shards on disk, read as a stream.

    <data_dir>/shards/<name>.json                                 the newest version
    <data_dir>/shards/<name>-<version>/
        shards.json  train-00000-of-00008.tfrecord ...  test-00000-of-00008.tfrecord ...

Example i is in shard i modulo the number of shards, so shards differ by at most one example. A record is a
`tf.train.Example` of `features` (the bytes of an array, in C order, little endian), `label` and an optional `weight`.
Images are stored as bytes and not as PNG: one operation decodes a whole batch of bytes, where each PNG takes more than
a tenth of a millisecond in every epoch.

`train.data.prepare.sharding` writes shards, `train.data.stream` reads them. Standard library only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.system.errors import ClusterError
from cluster.system.messages import COMMAND
from train.data import arrays, store
from train.data.arrays import ITEM_BYTES

INDEX = "shards.json"


@dataclass(frozen=True)
class ShardFile:
    """A shard."""

    path: Path
    num_examples: int
    size_bytes: int
    sha256: str
    blocks: tuple[int, ...]
    """The hash of each block, see `train/data/blocks.py`."""


@dataclass(frozen=True)
class ShardSplit:
    """Examples to train on or to test on, and their form; for the types see `train.data.arrays.Split`."""

    files: tuple[ShardFile, ...]
    feature_shape: tuple[int, ...]
    feature_dtype: str
    label_shape: tuple[int, ...]
    """Empty, or `[K]`."""
    label_dtype: str
    weighted: bool
    """Whether examples have weights; test examples never have."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Examples in each shard."""
        return tuple(file.num_examples for file in self.files)

    @property
    def num_examples(self) -> int:
        return sum(self.counts)

    @property
    def example_bytes(self) -> int:
        """Size of the features of one example."""
        return math.prod(self.feature_shape) * ITEM_BYTES[self.feature_dtype]


@dataclass(frozen=True)
class ShardSet:
    """A sharded dataset."""

    name: str
    version: str
    classes: tuple[str, ...]
    """The names of the classes; empty without names and for quantities."""
    num_outputs: int
    """Number of classes; for quantities, their number per example."""
    train: ShardSplit
    test: ShardSplit
    asked: Mapping[str, Any]
    """The options of `shard` with which it was written."""

    @property
    def files(self) -> tuple[ShardFile, ...]:
        return (*self.train.files, *self.test.files)

    def __str__(self) -> str:
        features = f"{list(self.train.feature_shape)} {self.train.feature_dtype}"
        counts = f"{len(self.train.files)} and {len(self.test.files)}"
        return f"{arrays.describe_data(self, features, self.train.label_dtype)}, in {counts} shards"


def describe_ready(data_dir: Path, name: str, source: str) -> str:
    """Describe a dataset that is prepared as `source`, `memory` or `stream`; empty if it must be prepared.

    A user's dataset is never ready, because its code may have changed.
    """
    if arrays.is_user_dataset(name):
        return ""
    try:
        return str(find_shards(data_dir, name) if source == "stream" else arrays.find_arrays(data_dir, name))
    except ClusterError:
        return ""  # preparing fixes or explains it


def find_shards(data_dir: Path, name: str, version: str = "") -> ShardSet:
    """Find the shards of a dataset, and compare every file's size with the index."""
    command = f"{COMMAND} data.shard --name {name}"
    version = version or store.read_pointer(data_dir, "shards", name, command)
    folder = store.path_of(data_dir, "shards", name, version)
    missing, again = f"{name} {version} is not sharded in {data_dir}; run `{command}`", f"run `{command} --fresh`"
    shard_set = store.read_index(folder / INDEX, partial(_from_index, folder), missing, again)
    sizes = {file.path: (file.size_bytes, f" for {file.num_examples} examples") for file in shard_set.files}
    store.check_sizes(sizes, again)
    return shard_set


def verify_shards(shard_set: ShardSet, say: Callable[[str], None] = print) -> None:
    """Recompute the sha256 of every shard and report a line for each."""
    expected = {file.path: file.sha256 for file in shard_set.files}
    store.verify_files(expected, f"run `{COMMAND} data.shard --name {shard_set.name} --fresh`", say)


def _from_index(folder: Path, index: Mapping[str, Any]) -> ShardSet:
    def file(entry: Mapping[str, Any]) -> ShardFile:
        size_bytes, blocks = entry["bytes"], store.block_hashes(entry, entry["bytes"])
        return ShardFile(folder / entry["file"], entry["examples"], size_bytes, entry["sha256"], blocks)

    def split(name: str) -> ShardSplit:
        files = index["splits"][name]
        return ShardSplit(
            tuple(file(entry) for entry in files),
            tuple(index["features"]["shape"]),
            index["features"]["dtype"],
            tuple(index["labels"]["shape"]),
            index["labels"]["dtype"],
            index["weighted"] and name == "train",
        )

    return ShardSet(
        name=index["name"],
        version=index["version"],
        classes=tuple(index["classes"]),
        num_outputs=index["num_outputs"],
        train=split("train"),
        test=split("test"),
        asked=index["asked"],
    )
