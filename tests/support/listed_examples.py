"""Examples to shard, without a dataset of TFDS."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.data.prepare import sharding
from train.data.shards import ShardSet

Examples = Sequence[tuple[Any, ...]]


class ListedExamples:
    """A source of listed examples, which counts how often it was opened."""

    def __init__(self, train: Examples, test: Examples, version: str = "1", classes: tuple[str, ...] = ()) -> None:
        self.splits, self.version, self.classes, self.opened = {"train": train, "test": test}, version, classes, 0

    def open(self) -> Mapping[str, int]:
        self.opened += 1
        return {split: len(examples) for split, examples in self.splits.items()}

    def examples(self, split: str) -> Iterator[tuple[Any, ...]]:
        return iter(self.splits[split])


def shard(data_dir: Path, name: str, source: ListedExamples, num_shards: int = 4, **options: Any) -> ShardSet:
    return sharding.write_shards(name, data_dir, num_shards=num_shards, open_source=lambda *_: source, **options)
