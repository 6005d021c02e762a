"""Calls a dataset function in a task, checks its result, and reads examples in the two forms that it may return.

    def my_data(split, shard):
        return ...  # a tf.data.Dataset of the shard's examples, or an object with __len__ and __getitem__

An example is `(features, labels)` or `(features, labels, weight)`; features and labels are arrays or dictionaries of
arrays, of the types of `train.data.dataset_record.DTYPES`. Every task compares the result with the record of the
function that was examined before the run.

Random-access sources: the examples of a step are a pure function of (seed, step), as with arrays. So a run resumes at
any step immediately, and the global batches are the same for any number of tasks. The graph calls the source by name
through an operation, `PyFuncStateless`, so it can run in any process that has opened the source, such as a worker under
parameter servers.

A `tf.data.Dataset` for each shard of the training split, one per replica or virtual shard. The function is traced once
for each shard that this task reads, and its dataset is rebuilt in every epoch with a new seed. An epoch takes as many
batches from each shard as there are steps that begin in it: a shard with too few examples starts over, and surplus
examples are left out, so that every shard has a batch for every step and no replica waits for another. A resumed run
reads its epoch from the beginning and skips the examples that it has trained on.

Shapes: B replica batch, G global batch, R replicas, L replicas of a task.
"""

import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx  # has no public name
from tensorflow.python.ops import script_ops  # the registry of functions that graphs call has no public name

from cluster.system.errors import ClusterError, RunFailed, UsageError
from cluster.system.messages import COMMAND
from train import named
from train.data import batches, store
from train.data.batches import INFINITE, Batch, BatchSlice, Replicas, without_sharding
from train.data.dataset_record import (
    PARTS,
    DatasetRecord,
    Leaf,
    Split,
    check_names,
    parse_part,
    show_example,
    stored_dtype,
)
from train.data.feeds import IndexedSource
from train.data.sources import Examples, Source
from train.named import Named
from train.settings import references
from train.settings.references import user_errors

_FAILURE = re.compile(r"(?:RunFailed|UsageError): (dataset [^\n]+)")
_WRONG_COUNT = re.compile(r"expected to contain (\d+) elements? but contained (only |at least )?(\d+)")
_ELSEWHERE = "Could not find callback with key=pyfunc_"
_OPEN: dict[str, "SplitReader"] = {}
"""Sources that this process has registered; TensorFlow keeps only weak references."""

RANDOM_ACCESS, DATASET = "random access", "tf.data.Dataset"


@dataclass(frozen=True, kw_only=True)
class FunctionRecord(DatasetRecord):
    """A dataset function, which has no files.

    Its name is `package.module:function`; its version the first 12 digits of the record's sha256.

    Attributes:
        form: the form of its result, `RANDOM_ACCESS` or `DATASET`.
        counted: whether the examples were counted, because the datasets do not know their length.
    """

    kind = "functions"
    form: str
    counted: bool

    @property
    def note(self) -> str:
        return f"{' (counted)' if self.counted else ''}, read by each task by {self.form}"

    @classmethod
    def path(cls, data_dir: Path, name: str, version: str) -> Path:
        path = store.path_of(data_dir, cls.kind, name, version)
        return path.with_name(f"{path.name}.json")

    @classmethod
    def from_json(cls, folder: Path, value: Mapping[str, Any]) -> Self:
        version = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
        classes = parse_part(value["example"]["labels"], lambda _: ())
        return super().from_json(folder, {**value, "version": version, "classes": classes})

    @classmethod
    def parse_split(cls, folder: Path, value: Mapping[str, Any], split: str) -> Split:  # noqa: ARG003  # it has no files
        example = {name: parse_part(part, Leaf.from_json) for name, part in value["example"].items()}
        return Split(value["counts"][split], example)


@dataclass(frozen=True)
class Shard:
    """The part of a split for which a dataset function is called.

    Attributes:
        index: index of the shard.
        count: number of shards of the split, which together must have each of its examples once.
        seed: seed of an epoch's order, an int64 scalar tensor that is the same for all shards. For a random-access
            source, which has no order, it is the run's seed, a number.
        data_dir: the folder of prepared data on this task's machine.
    """

    index: int
    count: int
    seed: Any
    data_dir: Path


def call_function(name: str, split: str, shard: Shard) -> Any:
    """Call a dataset function for a shard of a split; it returns a `tf.data.Dataset` or a random-access source."""
    function = references.load_object("--dataset", name)
    if not callable(function):
        raise UsageError(f"--dataset {name!r} is a {type(function).__name__}; expected a function of (split, shard)")
    if not references.accepts_arguments(function, "train", None):
        raise UsageError(f"--dataset {name!r}: expected a function of (split, shard), or no --source function")
    # The status makes autograph convert mapped functions in graphs, too.
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED), _shuffled_by(shard.seed):
        returned = references.call_user_function("--dataset", name, function, split, shard)
    if isinstance(returned, tf.data.Dataset):
        return returned
    indexed = hasattr(type(returned), "__len__") and hasattr(type(returned), "__getitem__")
    if not indexed or isinstance(returned, Mapping | tuple | str | bytes | np.ndarray | tf.keras.utils.Sequence):
        raise UsageError(
            f"--dataset {name!r} returns a {type(returned).__name__} for {split!r}; expected a tf.data.Dataset, or an "
            "object with __len__ and __getitem__ of single examples"
        )
    return returned


@contextlib.contextmanager
def _shuffled_by(shard_seed: Any) -> Iterator[None]:
    """Context manager in which `shuffle` without a seed takes the shard's; TensorFlow's is the same in every epoch."""
    shuffle = tf.data.Dataset.shuffle

    @functools.wraps(shuffle)
    def with_seed(
        dataset: Any, buffer_size: Any, seed: Any = None, reshuffle_each_iteration: Any = True, name: Any = None
    ) -> Any:
        if seed is None and reshuffle_each_iteration is not False:
            seed = shard_seed
        return shuffle(dataset, buffer_size, seed, reshuffle_each_iteration, name)

    tf.data.Dataset.shuffle = with_seed
    try:
        yield
    finally:
        tf.data.Dataset.shuffle = shuffle


def split_example(subject: str, example: Any) -> tuple[Any, ...]:
    """Return the features, labels and optional weight of an example or of its specification."""
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        actual = f"{len(example)} parts" if isinstance(example, tuple | list) else type(example).__name__
        raise UsageError(f"{subject} is {actual}; expected (features, labels) or (features, labels, weight)")
    return tuple(example)


def describe_example(subject: str, example: tuple[Any, ...]) -> dict[str, Named]:
    """Describe an example for `Split.example`, from NumPy arrays or a dataset's element specification."""

    def leaf(part: str, value: Any) -> Leaf:
        if not isinstance(value, tf.TensorSpec | np.ndarray):
            raise UsageError(
                f"{subject}: {part} are {type(value).__name__}; expected an array or a dictionary of arrays"
            )
        shape = value.shape
        if isinstance(shape, tf.TensorShape):
            if not shape.is_fully_defined():
                fix = "leave batch() out, or use tf.ensure_shape"
                raise UsageError(f"{subject}: {part} of the shape {shape}; expected one example of known sizes: {fix}")
            shape = shape.as_list()
        dtype = value.dtype.as_numpy_dtype if isinstance(value, tf.TensorSpec) else value.dtype
        return Leaf(tuple(shape), stored_dtype(f"{subject}: {part}", part, np.dtype(dtype)))

    described_parts = {}
    for part, values in zip(PARTS, example, strict=False):
        check_names(f"{subject}: {part}", values)
        described_parts[part] = named.each(lambda value, part=part: leaf(part, value), values)
    if "weights" in described_parts and getattr(described_parts["weights"], "shape", None) != ():
        raise UsageError(f"{subject}: {show_example({'weights': described_parts['weights']})}; expected one number")
    return described_parts


def describe_dataset(name: str, split: str, dataset: tf.data.Dataset) -> dict[str, Named]:
    """Describe the examples of a dataset that a function returns for a split."""
    subject = f"--dataset {name!r}: {split} example"
    return describe_example(subject, split_example(subject, dataset.element_spec))


def convert_to_arrays(subject: str, example: Any) -> tuple[Any, ...]:
    """Convert an example of a random-access source to NumPy arrays."""
    with references.user_errors(f"{subject} cannot be converted to arrays"):
        return tuple(named.each(np.asarray, part) for part in split_example(subject, example))


class SplitReader:
    """Reads the examples of one split, one call at a time, because a source need not be thread-safe."""

    def __init__(self, record: DatasetRecord, split: str, source: Any) -> None:
        self._subject, self._example, self._source = f"dataset {record.name}: {split}", record.train.example, source
        self._lock = threading.Lock()

    def __call__(self, indices_B: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of some examples, `[B, ...]`, in the order of their parts."""
        indices = indices_B.tolist()
        with self._lock, user_errors(f"{self._subject} examples {indices[0]} and following", RunFailed):
            if hasattr(type(self._source), "__getitems__"):
                examples = list(self._source.__getitems__(indices))
            else:
                examples = [self._source[index] for index in indices]
        rows = []
        for index, example in zip(indices, examples, strict=True):
            subject = f"{self._subject} example {index}"
            parts = convert_to_arrays(subject, example)
            if (actual := describe_example(subject, parts)) != self._example:
                raise RunFailed(f"{subject} is {show_example(actual)}; expected {show_example(self._example)}")
            row = []
            for name, part in zip(PARTS, parts, strict=False):
                arrays = named.each(lambda leaf, value: np.asarray(value, leaf.dtype), self._example[name], part)
                row += named.leaves(arrays)
            rows.append(row)
        return [np.stack(column) for column in zip(*rows, strict=True)]


def open_split(record: DatasetRecord, split: str, data_dir: Path, seed: int) -> None:
    """Open a split for graphs that run in this process."""
    token, expected = _token(record, split), record.splits[split].num_examples
    if token in _OPEN:
        return
    source = call_function(record.name, split, Shard(0, 1, seed, data_dir))
    if isinstance(source, tf.data.Dataset):
        raise UsageError(f"--dataset {record.name!r} returned a random-access source before; here a tf.data.Dataset")
    if (length := length_of(record.name, split, source)) != expected:
        raise UsageError(
            f"--dataset {record.name!r} has {length} {split} examples here, {expected} where it was examined; "
            f"let all tasks see the same data, then `{COMMAND} data.examine --name {record.name}`"
        )
    _OPEN[token] = script_ops._py_funcs._funcs[token] = SplitReader(record, split, source)


def length_of(name: str, split: str, source: Any) -> int:
    """Return the number of examples of a source."""
    with user_errors(f"--dataset {name!r}: length of {split!r}"):
        length = len(source)
    if not length:
        raise UsageError(f"--dataset {name!r} has no {split} example; expected at least one")
    return length


@dataclass(frozen=True)
class SplitExamples:
    """The examples of a split, read in a graph; see `train.data.sources.Examples`."""

    token: str
    split: Split

    @property
    def num_examples(self) -> int:
        return self.split.num_examples

    def read_batch(self, indices_B: tf.Tensor) -> Batch:
        with tf.device("CPU:0"):
            flat = tf.raw_ops.PyFuncStateless(
                input=[indices_B], token=self.token, Tout=[tf.as_dtype(leaf.dtype) for leaf in self.split.leaves]
            )
        size = indices_B.shape[0]
        pairs = zip(flat, self.split.leaves, strict=True)
        parts = self.split.join(tf.ensure_shape(array, [size, *leaf.shape]) for array, leaf in pairs)
        return Batch(parts["features"], parts["labels"], parts.get("weights", tf.ones([size])))


class RandomAccessSource(IndexedSource):
    """Examples of a random-access source that a user's function returns."""

    def examples(self, split: str) -> Examples:
        return SplitExamples(_token(self.record, split), self.record.splits[split])


def _token(record: DatasetRecord, split: str) -> str:
    return f"tf-cluster {record.name} {split}"


def read_examples(record: DatasetRecord, split: str, shard: Shard) -> tf.data.Dataset:
    """Return the examples of a shard, as `Batch`es of one example without the first axis."""
    dataset = call_function(record.name, split, shard)
    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(f"--dataset {record.name!r} returned a tf.data.Dataset before; here {type(dataset).__name__}")
    example = record.splits[split].example
    if (description := describe_dataset(record.name, split, dataset)) != example:
        raise UsageError(
            f"--dataset {record.name!r}: {split} example is {show_example(description)} in this task, "
            f"{show_example(example)} where it was examined; let all tasks see the same data"
        )

    @tf.autograph.experimental.do_not_convert
    def stored(*parts: Any) -> Batch:
        parts = parts[0] if len(parts) == 1 else parts  # a named tuple
        cast = {
            name: named.each(lambda value, leaf: tf.cast(value, leaf.dtype), part, example[name])
            for name, part in zip(PARTS, parts, strict=False)
        }
        return Batch(cast["features"], cast["labels"], cast.get("weights", tf.ones([])))

    return dataset.map(stored, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


@dataclass(frozen=True, kw_only=True)
class FunctionSource(Source):
    """Examples of the datasets that a user's function returns for shards."""

    data_dir: Path
    sharded: bool = True

    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        shards = [self.shard_batches(batch_slice, replica) for replica in batch_slice.replicas.numbers]
        in_turn = shards[0]
        if len(shards) > 1:
            in_turn = tf.data.Dataset.choose_from_datasets(shards, tf.data.Dataset.range(len(shards)).repeat())
        return without_sharding(in_turn.apply(INFINITE).prefetch(tf.data.AUTOTUNE))

    def shard_batches(self, batch_slice: BatchSlice, replica: int) -> tf.data.Dataset:
        """Return the infinite batches `[B, ...]` of one replica's shard."""
        num_examples, global_batch = self.train_examples, batch_slice.global_batch
        replica_batch, first_step = batch_slice.replica_batch, tf.cast(batch_slice.first_step, tf.int64)

        def begin(epoch: tf.Tensor) -> tf.Tensor:
            return -(-epoch * num_examples // global_batch)

        @tf.autograph.experimental.do_not_convert
        def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
            shard = Shard(replica, batch_slice.replicas.total, epoch_seed(batch_slice.seed, epoch), self.data_dir)
            skipped = tf.maximum(first_step - begin(epoch), 0)
            num_examples_read = replica_batch * (begin(epoch + 1) - begin(epoch))
            whole = read_examples(self.record, "train", shard).repeat().take(num_examples_read)
            whole = whole.apply(tf.data.experimental.assert_cardinality(num_examples_read))
            return whole.skip(skipped * replica_batch).batch(replica_batch, drop_remainder=True)

        return tf.data.Dataset.range(first_step * global_batch // num_examples, tf.int64.max).flat_map(epoch_batches)

    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        """Return the test batches; every task reads the whole split and takes its part, so all have as many."""
        split = self.record.test
        whole = read_examples(self.record, "test", Shard(0, 1, epoch_seed(0, tf.constant(0)), self.data_dir))
        whole = whole.apply(tf.data.experimental.assert_cardinality(split.num_examples))
        return batches.eval_dataset(whole, split, replica_batch, replicas, lambda part: part)


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the seed of an epoch, an int64 scalar from 1."""
    key = tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.stateless_uniform([], key, minval=1, maxval=2**31 - 1, dtype=tf.int64, alg="philox")


def explain(error: Exception) -> ClusterError | None:
    """Translate TensorFlow's error about a source that failed or a dataset's length; None for other errors."""
    if match := _FAILURE.search(str(error)):
        return RunFailed(match[1])
    if _ELSEWHERE in str(error):
        return RunFailed(
            "the dataset function's tf.data.Dataset calls Python (from_generator, py_function), which works only in "
            "the process that created it; return a random-access source"
        )
    if not (match := _WRONG_COUNT.search(str(error))):
        return None
    expected, actual = match[1], int(match[3])
    if not actual:
        return RunFailed(
            "the dataset function returned an empty shard; put examples into each shard, or use fewer replicas"
        )
    return RunFailed(
        f"a dataset of the dataset function has {match[2] or ''}{actual} examples, not the {expected} examined or "
        f"asserted; correct its assert_cardinality or run `{COMMAND} data.examine --fresh` on it, then start again"
    )
