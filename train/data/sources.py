"""The data of a run, whatever form it is in, and how it reaches the replicas.

A source knows the examples; a feed gives each replica its batches of them. Arrays are gathered inside the step itself,
where the data is in host memory and the replica on the same task can reach it; everything else is an iterator.

Shapes: B replica batch.
"""

from __future__ import annotations

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
from train.data import arrays, blocks, memory, own_dataset, shards, stream
from train.data.batches import Batch, BatchSlice, Replicas, own_share
from train.data.function import epochs, random_access
from train.data.function import record as functions
from train.data.function.service import Service, through
from train.elastic.virtual_shards import VirtualShards
from train.named import Named


@dataclass(frozen=True)
class Source:
    """Examples to train on and to test on.

    Attributes:
        version: of the data, as it was prepared.
        classes: their names; empty where they have none.
        num_outputs: classes, or values to predict.
        classifies: whether labels are classes.
        feature_shape: one example's shape, a tuple. Of a model with several inputs it is a dictionary of them by name,
            and with several heads `label_shape`, `classes`, `num_outputs` and `classifies` are.
        label_shape: that of its labels.
        train_examples: examples in an epoch.
        test_examples: examples to test on.
        train_dataset: returns the batches of a `BatchSlice`, step by step one for each replica.
        eval_dataset: returns those of the test split: (replica batch, `Replicas`) -> dataset.
        arrays: the examples themselves, where they fit in memory.
        weighted: whether examples to train on have weights.
        sharded: whether replicas read shards of their own, so that the batches depend on how many there are.
        train_batch: one replica's batch at any step, where that can be read; arguments as for `memory.train_batch`
            without the examples.
        own_order: batches for one of several workers that share no order, where they are not those of `train_dataset`
            from a random step on: (global batch, seed) -> dataset.
        num_shards: files that a stream is read from; its order depends on them.
        files: every file that is read, with its sha256 as it was prepared.
        made_from: the files that these were made from, which may be gone, with their sha256.
        again: what to do where a file is not what was prepared.
    """

    version: str
    classes: Named
    num_outputs: Named
    classifies: Named
    feature_shape: Named
    label_shape: Named
    train_examples: int
    test_examples: int
    train_dataset: Callable[[BatchSlice], tf.data.Dataset]
    eval_dataset: Callable[[int, Replicas], tf.data.Dataset]
    arrays: arrays.ArraySet | None = None
    weighted: bool = False
    sharded: bool = False
    train_batch: Callable[..., Batch] | None = None
    own_order: Callable[..., tf.data.Dataset] | None = None
    num_shards: int = 0
    files: Mapping[Path, str] = field(default_factory=dict)
    made_from: Mapping[str, str] = field(default_factory=dict)
    again: str = ""

    @property
    def named_outputs(self) -> Named:
        """The names of the classes that outputs stand for; None for outputs that are values."""
        return named.each(lambda classifies, names: names if classifies else None, self.classifies, self.classes)

    @property
    def is_text(self) -> bool:
        """Whether examples are bytes of a text, and labels the bytes that follow."""
        return self.arrays is not None and self.arrays.is_text


def _in_memory(found: arrays.ArraySet, context: int) -> Source:
    if found.is_text:
        found = found.cut(context)
    return Source(
        found.version,
        found.classes,
        found.num_outputs,
        named.each(lambda file: file.dtype.startswith("int"), found.train.labels),
        named.each(lambda file: file.shape[1:], found.train.features),
        named.each(lambda file: file.shape[1:], found.train.labels),
        found.train.num_examples,
        found.test.num_examples,
        functools.partial(memory.train_dataset, found.train),
        functools.partial(memory.eval_dataset, found.test),
        found,
        weighted=found.train.weights is not None,
        files={file.path: file.sha256 for file in found.files},
        made_from=found.source_files,
        again=f"run `invoke data.prepare --name {found.name} --fresh`",
    )


def _streamed(found: shards.ShardSet) -> Source:
    return Source(
        found.version,
        found.classes,
        found.num_outputs,
        found.train.label_dtype.startswith("int"),
        found.train.feature_shape,
        found.train.label_shape,
        found.train.num_examples,
        found.test.num_examples,
        functools.partial(stream.train_dataset, found.train),
        functools.partial(stream.eval_dataset, found.test),
        weighted=found.train.weighted,
        num_shards=len(found.train.files),
        files={file.path: file.sha256 for file in found.files},
        again=f"run `invoke data.shard --name {found.name} --fresh`",
    )


def _called(found: functions.Record, data_dir: Path, seed: int, service: Service | None) -> Source:
    """Return what a dataset function returns; opens it where it returns a random-access source."""
    classifies = named.each(lambda dtype: dtype == "int64", functions.of_each(found.example["labels"], "dtype"))
    what: dict[str, Any] = {
        "version": found.version,
        "classes": named.each(lambda _: (), classifies),
        "num_outputs": found.num_outputs,
        "classifies": classifies,
        "feature_shape": functions.of_each(found.example["features"], "shape"),
        "label_shape": functions.of_each(found.example["labels"], "shape"),
        "train_examples": found.counts["train"],
        "test_examples": found.counts["test"],
        "weighted": "weights" in found.example,
    }
    if not found.random_access:
        source = Source(
            **what,
            sharded=True,
            train_dataset=functools.partial(epochs.train_dataset, found, data_dir),
            eval_dataset=functools.partial(epochs.eval_dataset, found, data_dir),
            own_order=functools.partial(epochs.own_order, found, data_dir),
        )
        return through(source, found, data_dir, service) if service else source
    for split in found.counts:
        random_access.open_split(found, split, data_dir, seed)
    source = Source(
        **what,
        train_dataset=functools.partial(random_access.train_dataset, found),
        eval_dataset=functools.partial(random_access.eval_dataset, found),
        train_batch=functools.partial(random_access.train_batch, found),
    )
    return through(source, found, data_dir, service) if service else source


def find(config: TrainConfig, data_dir: Path, run: RunFolder | None = None, service: Service | None = None) -> Source:
    """Return the source that a configuration names.

    Args:
        config: of the run.
        data_dir: where the data was prepared.
        run: the run folder. What its first generation trained on is recorded there and used by every later one, even if
            something newer has been prepared under the same name meanwhile.
        service: of the data workers that prepare batches to train on, if there are any.

    Raises:
        PrerequisiteError: it was not prepared.
        RunFailed: it is damaged.
    """

    def look(version: str = "") -> Source:
        if config.source == "stream":
            return _streamed(shards.find(data_dir, config.dataset, version))
        if config.source == "function":
            return _called(functions.find(data_dir, config.dataset, version), data_dir, config.seed, service)
        return _in_memory(arrays.find(data_dir, config.dataset, version), config.transformer.context)

    if run is None:
        return look()
    record = run.control / "data.json"
    if not record.exists():
        found = look()
        create_json(record, {"version": found.version, "num_shards": found.num_shards})
    recorded = read_json(record)
    found = look(recorded["version"])
    if found.num_shards != recorded["num_shards"]:
        raise RunFailed(
            f"{config.dataset} has {found.num_shards} shards, and {recorded['num_shards']} when this run began: their "
            f"order is another one; `invoke data.shard --name {config.dataset} --shards {recorded['num_shards']}`, or "
            "start a new run"
        )
    return found


def describe(config: TrainConfig, data_dir: Path) -> Source:
    """Return the source that a configuration names for its shapes alone: the user's own arrays need not be prepared.

    Raises:
        ClusterError: other data was not prepared, or the user's function fails.
    """
    if config.source != "memory" or not arrays.is_own(config.dataset):
        return find(config, data_dir)
    own = own_dataset.read(config.dataset)
    found = arrays.unwritten(config.dataset, own.version, own.classes, own.splits)
    return _in_memory(found, config.transformer.context)


@dataclass(frozen=True)
class Feed:
    """What the steps of one loop work on.

    Attributes:
        next: called once a step, outside of the replicas; what it returns is passed to each of them.
        batch: called by each replica with that, the step and the replica's number, or that of one of its virtual
            shards; returns its batch.
        ahead: whether `next` may be called one step early, so that a step waits for no batch that comes during the one
            before.
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
    """Return the training batches of a synchronous strategy's replicas from step `first_step` on.

    Args:
        cut: into virtual shards, of every global batch; None: as many as replicas.
        micro_batches: into which each of them is cut again. `Feed.batch` takes the number of one of all, in order.
    """
    replicas = strategy.num_replicas_in_sync
    shards = cut or VirtualShards(replicas, replicas)
    parts = shards.total * micro_batches
    if source.arrays and not isinstance(strategy, tf.distribute.TPUStrategy):
        examples = memory.load(source.arrays.train)
        return Feed(lambda: (), _gather(examples, BatchSlice(global_batch, seed, replicas=Replicas(parts))))
    whole = cut is None and micro_batches == 1

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replicas = Replicas.of(context).numbers
        first, last = (shards.first(replica) for replica in (replicas.start, replicas.stop))
        own = Replicas(shards.total, first, last - first)
        batches = source.train_dataset(BatchSlice(global_batch, seed, first_step, replicas=own))
        return batches if whole else _stacked(_cut(batches, micro_batches), shards, micro_batches, replicas)

    iterator = iter(strategy.distribute_datasets_from_function(dataset))
    ahead = not isinstance(strategy, tf.distribute.TPUStrategy)  # where it could not be tried
    if whole:
        return Feed(iterator.get_next, lambda batch, _step, _replica: batch, ahead)

    def one_of(batches: Batch, _step: tf.Tensor, part: tf.Tensor) -> Batch:
        place = shards.place(part // micro_batches) * micro_batches + part % micro_batches
        return tf.nest.map_structure(lambda of: of[place], batches)

    return Feed(iterator.get_next, one_of, ahead)


def _cut(batches: tf.data.Dataset, parts: int) -> tf.data.Dataset:
    """Return the equal parts of each batch, one after the other."""
    if parts == 1:
        return batches

    def cut(of: tf.Tensor) -> tf.Tensor:
        return tf.reshape(of, [parts, of.shape[0] // parts, *of.shape[1:]])

    return batches.map(lambda batch: tf.nest.map_structure(cut, batch)).unbatch()


def joined(batches: tf.data.Dataset, parts: int) -> tf.data.Dataset:
    """Return whole batches of so many parts, which come one after the other."""
    if parts == 1:
        return batches

    def join(of: tf.Tensor) -> tf.Tensor:
        return tf.reshape(of, [of.shape[0] * of.shape[1], *of.shape[2:]])

    whole = batches.batch(parts, drop_remainder=True)
    return own_share(whole.map(lambda batch: tf.nest.map_structure(join, batch)))


def _stacked(batches: tf.data.Dataset, shards: VirtualShards, micro_batches: int, replicas: range) -> tf.data.Dataset:
    """Return for each of some replicas the batches of all parts of its shards, `[most, B, ...]`.

    Where another replica has a shard more, a replica's last part comes again: all must have the same shape.
    """
    firsts = {replica: shards.first(replica) * micro_batches for replica in range(replicas.start, replicas.stop + 1)}
    most = shards.most * micro_batches
    places = [[min(firsts[r] + at, firsts[r + 1] - 1) for at in range(most)] for r in replicas]
    index_Lm = tf.constant(places) - firsts[replicas.start]

    def by_replica(of_step: Batch) -> Batch:
        return tf.nest.map_structure(lambda part: tf.gather(part, index_Lm), of_step)

    own = batches.batch(firsts[replicas.stop] - firsts[replicas.start], drop_remainder=True)
    return own_share(own.map(by_replica).unbatch())


def eval_feed(strategy: tf.distribute.Strategy | None, source: Source, replica_batch: int) -> Feed:
    """Return the test split's batches; the step given to `batch` counts them. Every pass must take all of them."""
    replicas = strategy.num_replicas_in_sync if strategy else 1
    if source.arrays and not isinstance(strategy, tf.distribute.TPUStrategy):
        examples = memory.load(source.arrays.test)

        def batch(_given: Any, at: tf.Tensor, replica: tf.Tensor) -> Batch:
            return memory.eval_batch(examples, at, replica, replica_batch=replica_batch, num_replicas=replicas)

        return Feed(lambda: (), batch)

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return source.eval_dataset(replica_batch, Replicas.of(context)).repeat()

    # One iterator for all passes, as long as each takes all of its batches: a new one would be a new graph.
    own = tf.distribute.InputContext()
    iterator = iter(strategy.distribute_datasets_from_function(dataset) if strategy else dataset(own))
    return Feed(iterator.get_next, lambda batch, _at, _replica: batch)


def _gather(examples: memory.Examples, batch_slice: BatchSlice) -> Callable[..., Batch]:
    def batch(_given: Any, step: tf.Tensor, replica: tf.Tensor) -> Batch:
        return memory.train_batch(examples, step, replica, batch_slice)

    return batch


def explain(error: Exception) -> ClusterError | None:
    """Return what an error of TensorFlow says of the data; None where it says something else."""
    return blocks.explain(error) or random_access.explain(error) or epochs.explain(error)
