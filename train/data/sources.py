"""The data of a run in any form: arrays in memory, shards as a stream, or a user's function.

Shapes: B replica batch.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import ClusterError, RunFailed
from cluster.system.json_files import create_json, read_json
from cluster.system.messages import COMMAND
from train import named
from train.config import TrainConfig
from train.data import arrays, blocks, feeds, shards, stream
from train.data.batches import BatchSlice, Replicas, by_step, eval_batches
from train.data.feeds import Examples
from train.data.function import calling, reading
from train.data.function.calling import FunctionRecord
from train.named import Named


@dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """Examples to train on and to test on.

    With several inputs or heads, the values that describe one are dictionaries.

    Attributes:
        classes: names of the classes; empty without names.
        num_outputs: number of classes or of values to predict.
        train_examples: examples in an epoch.
        arrays: the examples, if they are gathered inside the step.
        weighted: whether training examples have weights.
        sharded: whether replicas read separate shards, so that batches depend on the number of replicas.
        num_shards: number of files of a stream, on which its order depends.
        files: all files with their sha256.
    """

    version: str
    classes: Named
    num_outputs: Named
    classifies: Named
    feature_shape: Named
    label_shape: Named
    train_examples: int
    test_examples: int
    weighted: bool
    arrays: arrays.ArraySet | None = None
    sharded: bool = False
    num_shards: int = 0
    files: Mapping[Path, str] = field(default_factory=dict)

    @property
    def named_outputs(self) -> Named:
        """Names of the classes of the outputs; None for outputs that are values."""
        return named.each(lambda classifies, names: names if classifies else None, self.classifies, self.classes)

    @abc.abstractmethod
    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        """Return the batches of a slice: one for each replica, step by step.

        Their shapes are static, as `tf.distribute.Strategy.distribute_datasets_from_function` requires.
        """

    @abc.abstractmethod
    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        """Return the batches of the test split, with the same number for every replica."""

    def shuffled_batches(self, global_batch: int, seed: int) -> tf.data.Dataset:
        """Return infinite global batches for one of several equal workers, from a random epoch.

        All workers run the same graph and do not know their index. Each draws its epoch in each generation.
        """
        first, last = (tf.constant(number, tf.int64) for number in (0, 2**20))
        # Unlike `tf.random`, also random where operations are deterministic.
        epoch = tf.raw_ops.RandomUniformInt(shape=tf.zeros(0, tf.int32), minval=first, maxval=last, seed=0, seed2=0)
        return self.train_dataset(BatchSlice(global_batch, seed, self.train_examples * epoch // global_batch))


class IndexedSource(Source):
    """Examples any of which can be read by its number."""

    @abc.abstractmethod
    def examples(self, split: str) -> Examples:
        """Return the examples of a split, eagerly or inside a graph."""

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        batch = partial(feeds.train_batch, self.examples("train"), batch_slice=batch_slice)
        return by_step(batch, batch_slice.num_batches, batch_slice.replicas, batch_slice.first_step)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        sizes = {"replica_batch": replica_batch, "num_replicas": replicas.total}
        batch = partial(feeds.eval_batch, self.examples("test"), **sizes)
        return by_step(batch, eval_batches(self.test_examples, **sizes) * replicas.count, replicas)


@dataclass(frozen=True, kw_only=True)
class ArraySource(IndexedSource):
    """Examples that fit in memory."""

    splits: Mapping[str, arrays.Split]

    @classmethod
    def from_arrays(cls, array_set: arrays.ArraySet) -> ArraySource:
        """Return the source of prepared arrays."""
        train, test = array_set.train, array_set.test
        return cls(
            version=array_set.version,
            classes=array_set.classes,
            num_outputs=array_set.num_outputs,
            classifies=named.each(lambda file: file.dtype.startswith("int"), train.labels),
            feature_shape=named.each(lambda file: file.shape[1:], train.features),
            label_shape=named.each(lambda file: file.shape[1:], train.labels),
            train_examples=train.num_examples,
            test_examples=test.num_examples,
            weighted=train.weights is not None,
            arrays=array_set,
            files={file.path: file.sha256 for file in array_set.files},
            splits={"train": train, "test": test},
        )

    def examples(self, split: str) -> Examples:
        return feeds.load_examples(self.splits[split])


@dataclass(frozen=True, kw_only=True)
class ShardSource(Source):
    """Examples in TFRecord shards."""

    train: shards.ShardSplit
    test: shards.ShardSplit

    @classmethod
    def from_shards(cls, shard_set: shards.ShardSet) -> ShardSource:
        """Return the source of prepared shards."""
        train, test = shard_set.train, shard_set.test
        return cls(
            version=shard_set.version,
            classes=shard_set.classes,
            num_outputs=shard_set.num_outputs,
            classifies=train.label_dtype.startswith("int"),
            feature_shape=train.feature_shape,
            label_shape=train.label_shape,
            train_examples=train.num_examples,
            test_examples=test.num_examples,
            weighted=train.weighted,
            num_shards=len(train.files),
            files={file.path: file.sha256 for file in shard_set.files},
            train=train,
            test=test,
        )

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        return stream.train_dataset(self.train, batch_slice)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        return stream.eval_dataset(self.test, replica_batch, replicas)


@dataclass(frozen=True, kw_only=True)
class RandomAccessSource(IndexedSource):
    """Examples that a user's function returns by their numbers."""

    record: FunctionRecord

    def examples(self, split: str) -> Examples:
        return reading.SplitExamples(self.record, split)


@dataclass(frozen=True, kw_only=True)
class FunctionSource(Source):
    """Examples of the datasets that a user's function returns for shards."""

    record: FunctionRecord
    data_dir: Path

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        return reading.train_dataset(self.record, self.data_dir, batch_slice)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        return reading.eval_dataset(self.record, self.data_dir, replica_batch, replicas)


def _open_function(record: FunctionRecord, data_dir: Path, seed: int) -> Source:
    """Return the source of an examined function, and open its random-access source if it returns one."""
    labels = record.example["labels"]
    described: dict[str, Any] = {
        "record": record,
        "version": record.version,
        "classes": named.each(lambda _: (), labels),
        "num_outputs": record.num_outputs,
        "classifies": named.each(lambda leaf: leaf.dtype == "int64", labels),
        "feature_shape": named.each(lambda leaf: leaf.shape, record.example["features"]),
        "label_shape": named.each(lambda leaf: leaf.shape, labels),
        "train_examples": record.counts["train"],
        "test_examples": record.counts["test"],
        "weighted": "weights" in record.example,
    }
    if record.form == calling.DATASET:
        return FunctionSource(data_dir=data_dir, sharded=True, **described)
    for split in record.counts:
        reading.open_split(record, split, data_dir, seed)
    return RandomAccessSource(**described)


def open_source(config: TrainConfig, data_dir: Path, run: RunFolder | None = None) -> Source:
    """Return the source that a configuration names.

    `run` records the data of the first generation, which later ones use even if newer data of that name is prepared.
    """

    def open_version(version: str = "") -> Source:
        if config.source == "stream":
            return ShardSource.from_shards(shards.find_shards(data_dir, config.dataset, version))
        if config.source == "function":
            return _open_function(calling.read_record(data_dir, config.dataset, version), data_dir, config.seed)
        array_set = arrays.find_arrays(data_dir, config.dataset, version)
        return ArraySource.from_arrays(array_set.cut(config.transformer.context))

    if run is None:
        return open_version()
    record = run.control / "data.json"
    if not record.exists():
        newest = open_version()
        create_json(record, {"version": newest.version, "num_shards": newest.num_shards})
    recorded = read_json(record)
    source = open_version(recorded["version"])
    if source.num_shards != recorded["num_shards"]:
        raise RunFailed(
            f"{config.dataset} has {source.num_shards} shards, and {recorded['num_shards']} when this run began, "
            f"which changes their order; run `{COMMAND} data.shard --name {config.dataset} "
            f"--shards {recorded['num_shards']}`, or start a new run"
        )
    return source


def explain(error: Exception) -> ClusterError | None:
    """Translate TensorFlow's error about the data; None for other errors."""
    return blocks.explain(error) or reading.explain(error)
