"""Distinguishable examples: listed ones to shard, and dataset functions of (split, shard)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from train.data.batches import BatchSlice, Replicas
from train.data.dataset_record import ShardRecord
from train.data.function.reading import Shard
from train.data.prepare import sharding
from train.data.sources import Source

Examples = Sequence[tuple[Any, ...]]
TRAIN, TEST = 20, 6


class ListedExamples:
    """A source of listed examples, which counts how often it was opened."""

    def __init__(self, train: Examples, test: Examples, version: str = "1", classes: tuple[str, ...] = ()) -> None:
        self.splits, self.version, self.classes, self.opened = {"train": train, "test": test}, version, classes, 0

    def open(self) -> Mapping[str, int]:
        self.opened += 1
        return {split: len(examples) for split, examples in self.splits.items()}

    def examples(self, split: str) -> Iterator[tuple[Any, ...]]:
        return iter(self.splits[split])


def shard(data_dir: Path, name: str, source: ListedExamples, num_shards: int = 4, **options: Any) -> ShardRecord:
    with mock.patch.object(sharding, "_open_source", return_value=source):
        return sharding.write_shards(name, data_dir, num_shards=num_shards, **options)


class Numbers:
    """A source whose example i is `[i, i]` of class i modulo 3."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index, np.float64), index % 3


def numbers(split: str, _shard: Shard) -> Any:
    return Numbers(TRAIN if split == "train" else TEST)


def ranges(split: str, shard: Shard) -> tf.data.Dataset:
    """Return a shard's part of the numbers as a dataset, shuffled by the shard's seed."""
    dataset = tf.data.Dataset.range(TRAIN if split == "train" else TEST).shard(shard.count, shard.index)
    if split == "train":
        dataset = dataset.shuffle(TRAIN, seed=shard.seed)
    return dataset.map(lambda i: (tf.fill([2], tf.cast(i, tf.float64)), i % 3))


def steps(source: Source, first: int, count: int, replicas: int = 1, own: range | None = None) -> list[Any]:
    """Return the first feature of every example of some steps: a list per batch of each replica in `own`."""
    own = own or range(replicas)
    batches = source.train_dataset(BatchSlice(6, 7, first, Replicas(replicas, own.start, len(own))))
    return [batch.features[:, 0].numpy().astype(int).tolist() for batch in batches.take(count * len(own))]
