"""The prepared form of a dataset that does not fit in memory: TFRecord shards on disk, read as a stream.

    <data_dir>/shards/<name>-<version>/
        shards.json  train-00000-of-00008.tfrecord ...  test-00000-of-00008.tfrecord ...

Example i is in shard i modulo the number of shards, so shards differ by at most one example. A record is a
`tf.train.Example` of `features` (the bytes of an array, in C order, little endian), `label` and an optional `weight`.
Images are stored as bytes and not as PNG: one operation decodes a whole batch of bytes, while each PNG takes more than
0.1 ms in every epoch.

`train.data.prepare.sharding` writes shards, `train.data.stream` reads them. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.system.errors import ClusterError
from train.data.arrays import ArrayRecord
from train.data.dataset_record import DataFile, DatasetRecord, Leaf, Split, is_user_dataset


@dataclass(frozen=True, kw_only=True)
class ShardRecord(DatasetRecord):
    """A sharded dataset. An example has one array of features, and a label of the shape `[]` or `[K]`.

    `asked` holds the options of `data.shard` with which it was written.
    """

    kind = "shards"
    asked: Mapping[str, Any]

    @property
    def note(self) -> str:
        return f", in {len(self.train.files)} and {len(self.test.files)} shards"

    @classmethod
    def parse_split(cls, folder: Path, value: Mapping[str, Any], split: str) -> Split:
        example = {part: Leaf.from_json(value[part]) for part in ("features", "labels")}
        if value["weighted"] and split == "train":
            example["weights"] = Leaf((), "float32")
        entries = value["splits"][split]
        files = tuple(DataFile.from_entry(folder, entry, entry["examples"], entry["bytes"]) for entry in entries)
        return Split(sum(file.num_examples for file in files), example, files)


def describe_ready(data_dir: Path, name: str, source: str) -> str:
    """Describe a dataset that is prepared as `source`, `memory` or `stream`; empty if it must be prepared.

    A user's dataset is never ready, because its code may have changed.
    """
    if is_user_dataset(name):
        return ""
    try:
        return str((ShardRecord if source == "stream" else ArrayRecord).find(data_dir, name))
    except ClusterError:
        return ""  # preparing fixes or explains it
