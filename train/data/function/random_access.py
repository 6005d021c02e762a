"""Batches from a random-access source: the examples of a step are a pure function of (seed, step), as those of arrays.

So a run resumes at any step immediately, and any number of tasks has the same global batches. The graph calls the
source by an operation that names it, `PyFuncStateless`, so it can run in any process that has opened the source: a
task, a worker of parameter servers.

Shapes: B replica batch.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops  # the registry of functions that graphs call has no public name

from cluster.system.errors import ClusterError, RunFailed, UsageError
from cluster.system.messages import COMMAND, described
from train import named
from train.data.batches import Batch
from train.data.function import calling
from train.data.function.calling import PARTS, FunctionRecord, Shard

_FAILURE = re.compile(r"RunFailed: (dataset [^\n]+)")
_ELSEWHERE = "Could not find callback with key=pyfunc_"
_OPEN: dict[str, Callable[..., Any]] = {}
"""Sources that this process has registered; TensorFlow keeps only weak references."""


class SplitReader:
    """Reads the examples of one split, one call at a time, because a source need not be thread-safe."""

    def __init__(self, record: FunctionRecord, split: str, source: Any) -> None:
        self._record, self._split, self._source = record, split, source
        self._lock = threading.Lock()

    def __call__(self, indices_B: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of some examples, `[B, ...]`, in the order of their parts."""
        indices = indices_B.tolist()
        with self._lock:
            examples = self._read(indices)
        columns = zip(
            *(self._flat(index, example) for index, example in zip(indices, examples, strict=True)), strict=True
        )
        return [np.stack(column) for column in columns]

    def _read(self, indices: list[int]) -> Sequence[Any]:
        try:
            if hasattr(type(self._source), "__getitems__"):
                return list(self._source.__getitems__(indices))
            return [self._source[index] for index in indices]
        except (Exception, SystemExit) as error:
            raise RunFailed(
                f"dataset {self._record.name}: reading {self._split} examples {indices[0]} and following: "
                f"{described(error)}"
            ) from error

    def _flat(self, index: int, example: Any) -> list[np.ndarray]:
        subject = f"dataset {self._record.name}: {self._split} example {index}"
        try:
            parts = calling.convert_to_arrays(subject, example)
            if (actual := calling.describe_example(subject, parts)) != self._record.example:
                expected = calling.show_example(self._record.example)
                raise RunFailed(f"{subject} is {calling.show_example(actual)}; expected {expected}")
        except UsageError as error:
            raise RunFailed(str(error)) from error
        flat = []
        for name, part in zip(PARTS, parts, strict=False):
            arrays = named.each(lambda leaf, value: np.asarray(value, leaf.dtype), self._record.example[name], part)
            flat += named.leaves(arrays)
        return flat


def open_split(record: FunctionRecord, split: str, data_dir: Path, seed: int) -> None:
    """Open a split for graphs that run in this process."""
    if _token(record, split) in _OPEN:
        return
    source = calling.call_function(record.name, split, Shard(0, 1, seed, data_dir))
    if isinstance(source, tf.data.Dataset):
        raise UsageError(f"--dataset {record.name!r} returned a random-access source before; here a tf.data.Dataset")
    if (length := length_of(record.name, split, source)) != record.counts[split]:
        raise UsageError(
            f"--dataset {record.name!r} has {length} {split} examples here, {record.counts[split]} where it was "
            f"examined; let all tasks see the same data, then `{COMMAND} data.examine --name {record.name}`"
        )
    reader = SplitReader(record, split, source)
    _OPEN[_token(record, split)] = reader
    script_ops._py_funcs._funcs[_token(record, split)] = reader


def length_of(name: str, split: str, source: Any) -> int:
    """Return the number of examples of a source."""
    try:
        length = len(source)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--dataset {name!r}: length of {split!r}: {described(error)}") from None
    if not length:
        raise UsageError(f"--dataset {name!r} has no {split} example; expected at least one")
    return length


@dataclass(frozen=True)
class SplitExamples:
    """The examples of a split, read in a graph; see `train.data.feeds.Examples`."""

    record: FunctionRecord
    split: str

    @property
    def num_examples(self) -> int:
        return self.record.counts[self.split]

    def read_batch(self, indices_B: tf.Tensor) -> Batch:
        described_leaves = self.record.leaves
        with tf.device("CPU:0"):
            flat = tf.raw_ops.PyFuncStateless(
                input=[indices_B],
                token=_token(self.record, self.split),
                Tout=[tf.as_dtype(leaf.dtype) for leaf in described_leaves],
            )
        size = indices_B.shape[0]
        pairs = zip(flat, described_leaves, strict=True)
        shaped = iter([tf.ensure_shape(array, [size, *leaf.shape]) for array, leaf in pairs])
        parts = {name: named.each(lambda _: next(shaped), part) for name, part in self.record.example.items()}
        return Batch(parts["features"], parts["labels"], parts.get("weights", tf.ones([size])))


def explain(error: Exception) -> ClusterError | None:
    """Translate TensorFlow's error about a source that failed; None for other errors."""
    if match := _FAILURE.search(str(error)):
        return RunFailed(match[1])
    if _ELSEWHERE in str(error):
        return RunFailed(
            "the dataset function's tf.data.Dataset calls Python (from_generator, py_function), which works only in "
            "the process that created it; return a random-access source"
        )
    return None


def _token(record: FunctionRecord, split: str) -> str:
    return f"tf-cluster {record.name} {split}"
