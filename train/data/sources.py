"""The data of a run in any form, and its way to the replicas.

A source has the examples, and a feed gives each replica its batches. Arrays are gathered inside the step, from host
memory of the replica's task; all other data comes from an iterator.

Shapes: B replica batch.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import ClusterError, RunFailed
from cluster.system.json_files import create_json, read_json
from train import named
from train.config import TrainConfig
from train.data import array_batches, arrays, blocks, shards, stream
from train.data.batches import Batch, BatchSlice, Replicas, random_number, without_sharding
from train.data.function import calling, epochs, random_access
from train.data.function.calling import Record
from train.data.function.data_service import Service
from train.elastic.virtual_shards import VirtualShards
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
        made_from: the original files, which may be missing, with their sha256.
        again: the command that prepares damaged files again.
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
    made_from: Mapping[str, str] = field(default_factory=dict)
    again: str = ""

    @property
    def named_outputs(self) -> Named:
        """Names of the classes of the outputs; None for outputs that are values."""
        return named.each(lambda classifies, names: names if classifies else None, self.classifies, self.classes)

    @property
    def train_batch(self) -> Callable[[tf.Tensor, tf.Tensor, BatchSlice], Batch] | None:
        """Function of (step, replica, slice) that reads one replica's batch of any step in a graph, if possible."""
        return None

    @abc.abstractmethod
    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        """Return the batches of a slice: one for each replica, step by step."""

    @abc.abstractmethod
    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        """Return the batches of the test split, with the same number for every replica."""

    def shuffled_batches(self, global_batch: int, seed: int) -> tf.data.Dataset:
        """Return infinite global batches for one of several equal workers, from a random place of the order.

        All workers run the same graph and do not know their index. Each draws its place in each generation.
        """
        return self.train_dataset(BatchSlice(global_batch, seed, random_number(2**31)))


@dataclass(frozen=True, kw_only=True)
class ArraySource(Source):
    """Examples that fit in memory."""

    train: arrays.Split
    test: arrays.Split

    @classmethod
    def of(cls, array_set: arrays.ArraySet, context: int) -> ArraySource:
        """Return the source of prepared arrays; `context` is the length of the examples of a text."""
        if array_set.is_text:
            array_set = array_set.cut(context)
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
            made_from=array_set.source_files,
            again=f"run `invoke data.prepare --name {array_set.name} --fresh`",
            train=train,
            test=test,
        )

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        return array_batches.train_dataset(self.train, batch_slice)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        return array_batches.eval_dataset(self.test, replica_batch, replicas)


@dataclass(frozen=True, kw_only=True)
class ShardSource(Source):
    """Examples in TFRecord shards."""

    train: shards.ShardSplit
    test: shards.ShardSplit

    @classmethod
    def of(cls, shard_set: shards.ShardSet) -> ShardSource:
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
            again=f"run `invoke data.shard --name {shard_set.name} --fresh`",
            train=train,
            test=test,
        )

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        return stream.train_dataset(self.train, batch_slice)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        return stream.eval_dataset(self.test, replica_batch, replicas)


@dataclass(frozen=True, kw_only=True)
class FunctionSource(Source):
    """Examples of a function of (split, shard), read by each task or prepared by data workers."""

    record: Record
    data_dir: Path
    service: Service | None

    @classmethod
    def of(cls, record: Record, data_dir: Path, seed: int, service: Service | None) -> FunctionSource:
        """Return the source of an examined function, and open its random-access source if it returns one."""
        if record.random_access:
            for split in record.counts:
                random_access.open_split(record, split, data_dir, seed)
        classifies = named.each(lambda dtype: dtype == "int64", calling.of_each(record.example["labels"], "dtype"))
        return cls(
            version=record.version,
            classes=named.each(lambda _: (), classifies),
            num_outputs=record.num_outputs,
            classifies=classifies,
            feature_shape=calling.of_each(record.example["features"], "shape"),
            label_shape=calling.of_each(record.example["labels"], "shape"),
            train_examples=record.counts["train"],
            test_examples=record.counts["test"],
            weighted="weights" in record.example,
            sharded=not record.random_access,
            record=record,
            data_dir=data_dir,
            service=service,
        )

    @property
    def train_batch(self) -> Callable[[tf.Tensor, tf.Tensor, BatchSlice], Batch] | None:
        if self.service or not self.record.random_access:
            return None
        return functools.partial(random_access.train_batch, self.record)

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        if self.service:
            return self.service.dataset(self.record, self.data_dir, batch_slice)
        if self.record.random_access:
            return random_access.train_dataset(self.record, batch_slice)
        return epochs.train_dataset(self.record, self.data_dir, batch_slice)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        if self.record.random_access:
            return random_access.eval_dataset(self.record, replica_batch, replicas)
        return epochs.eval_dataset(self.record, self.data_dir, replica_batch, replicas)

    def shuffled_batches(self, global_batch: int, seed: int) -> tf.data.Dataset:
        if self.service:
            return self.train_dataset(BatchSlice(global_batch, seed))
        if self.record.random_access:
            return super().shuffled_batches(global_batch, seed)
        return epochs.shuffled_batches(self.record, self.data_dir, global_batch, seed)


def find(config: TrainConfig, data_dir: Path, run: RunFolder | None = None, service: Service | None = None) -> Source:
    """Return the source that a configuration names.

    Args:
        run: the run folder. It records the data of the first generation, which all later ones use even if newer data
            has been prepared with the same name.
        service: the service of data workers, if there are any.
    """

    def open_version(version: str = "") -> Source:
        if config.source == "stream":
            return ShardSource.of(shards.find(data_dir, config.dataset, version))
        if config.source == "function":
            record = calling.find(data_dir, config.dataset, version)
            return FunctionSource.of(record, data_dir, config.seed, service)
        return ArraySource.of(arrays.find(data_dir, config.dataset, version), config.transformer.context)

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
            f"which changes their order; run `invoke data.shard --name {config.dataset} "
            f"--shards {recorded['num_shards']}`, or start a new run"
        )
    return source


@dataclass(frozen=True)
class Feed:
    """The batches of the steps of one loop.

    Attributes:
        next: called once a step, in cross-replica context; its result is passed to each replica.
        batch: called by each replica with that result, the step and the number of the replica or of one of its virtual
            shards; returns its batch.
        ahead: whether `next` may be called one step early, so that a batch can arrive during the step before.
    """

    next: Callable[[], Any]
    batch: Callable[[Any, tf.Tensor, tf.Tensor], Batch]
    ahead: bool = False


def train_feed(
    strategy: tf.distribute.Strategy,
    source: Source,
    first_step: int,
    global_batch: int,
    seed: int,
    cut: VirtualShards | None = None,
    micro_batches: int = 1,
) -> Feed:
    """Return the training batches of a synchronous strategy's replicas from step `first_step`.

    Args:
        cut: virtual shards of every global batch; None for one per replica.
        micro_batches: number of micro-batches of each shard. `Feed.batch` takes the number of one of all, in order.
    """
    replicas = strategy.num_replicas_in_sync
    shards = cut or VirtualShards(replicas, replicas)
    parts = shards.total * micro_batches
    if source.arrays and not isinstance(strategy, tf.distribute.TPUStrategy):
        examples = array_batches.load(source.arrays.train)
        batch_slice = BatchSlice(global_batch, seed, replicas=Replicas(parts))
        return Feed(lambda: (), lambda _next, step, part: array_batches.train_batch(examples, step, part, batch_slice))
    whole = cut is None and micro_batches == 1

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = Replicas.of(context).numbers
        first, last = (shards.first(replica) for replica in (replicas.start, replicas.stop))
        parts = Replicas(shards.total, first, last - first)
        batches = source.train_dataset(BatchSlice(global_batch, seed, first_step, replicas=parts))
        return batches if whole else _stacked(_cut(batches, micro_batches), shards, micro_batches, replicas)

    iterator = iter(strategy.distribute_datasets_from_function(dataset))
    ahead = not isinstance(strategy, tf.distribute.TPUStrategy)  # not tested on TPUs
    if whole:
        return Feed(iterator.get_next, lambda batch, _step, _replica: batch, ahead)

    def batch_of_part(batches: Batch, _step: tf.Tensor, part: tf.Tensor) -> Batch:
        place = shards.place(part // micro_batches) * micro_batches + part % micro_batches
        return tf.nest.map_structure(lambda tensor: tensor[place], batches)

    return Feed(iterator.get_next, batch_of_part, ahead)


def _cut(batches: tf.data.Dataset, parts: int) -> tf.data.Dataset:
    """Cut each batch into equal parts."""
    if parts == 1:
        return batches

    def cut(tensor: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tensor, [parts, tensor.shape[0] // parts, *tensor.shape[1:]])

    return batches.map(lambda batch: tf.nest.map_structure(cut, batch)).unbatch()


def joined(batches: tf.data.Dataset, parts: int) -> tf.data.Dataset:
    """Join each group of `parts` batches to one batch."""
    if parts == 1:
        return batches

    def join(tensor: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tensor, [tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]])

    whole = batches.batch(parts, drop_remainder=True)
    return without_sharding(whole.map(lambda batch: tf.nest.map_structure(join, batch)))


def _stacked(batches: tf.data.Dataset, shards: VirtualShards, micro_batches: int, replicas: range) -> tf.data.Dataset:
    """Stack the batches of all parts of each replica's shards, `[most, B, ...]`.

    If another replica has one shard more, a replica's last part is repeated, because all must have the same shape.
    """
    firsts = {replica: shards.first(replica) * micro_batches for replica in range(replicas.start, replicas.stop + 1)}
    most = shards.most * micro_batches
    places = [[min(firsts[r] + at, firsts[r + 1] - 1) for at in range(most)] for r in replicas]
    index_Lm = tf.constant(places) - firsts[replicas.start]

    def by_replica(parts: Batch) -> Batch:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, index_Lm), parts)

    steps = batches.batch(firsts[replicas.stop] - firsts[replicas.start], drop_remainder=True)
    return without_sharding(steps.map(by_replica).unbatch())


def eval_feed(strategy: tf.distribute.Strategy | None, source: Source, replica_batch: int) -> Feed:
    """Return the test split's batches, which the step of `Feed.batch` counts. Every pass must take all of them."""
    replicas = strategy.num_replicas_in_sync if strategy else 1
    if source.arrays and not isinstance(strategy, tf.distribute.TPUStrategy):
        examples = array_batches.load(source.arrays.test)
        sizes = {"replica_batch": replica_batch, "num_replicas": replicas}
        return Feed(lambda: (), lambda _next, at, replica: array_batches.eval_batch(examples, at, replica, **sizes))

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return source.eval_dataset(replica_batch, Replicas.of(context)).repeat()

    # One iterator for all passes, because a new one would need a new graph.
    iterator = iter(
        strategy.distribute_datasets_from_function(dataset) if strategy else dataset(tf.distribute.InputContext())
    )
    return Feed(iterator.get_next, lambda batch, _at, _replica: batch)


def explain(error: Exception) -> ClusterError | None:
    """Translate TensorFlow's error about the data; None for other errors."""
    return blocks.explain(error) or random_access.explain(error) or epochs.explain(error)
