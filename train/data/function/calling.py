"""Calls a dataset function, checks its result, and keeps a record of the function that was examined before the run.

    def my_data(split, shard):
        return ...  # a tf.data.Dataset of the shard's examples, or an object with __len__ and __getitem__

An example is `(features, labels)` or `(features, labels, weight)`; features and labels are arrays or dictionaries of
arrays, of the types of `train.data.arrays.DTYPES`. Every task compares the function's result with the record:

    <data_dir>/functions/<name>.json             the version of the newest record
    <data_dir>/functions/<name>-<version>.json   a record
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx  # has no public name

from cluster.system.errors import ClusterError, UsageError
from cluster.system.json_files import write_json
from cluster.system.messages import COMMAND, described
from train import named
from train.data import arrays, store
from train.named import Named
from train.settings import references

SPLITS = ("train", "test")
RANDOM_ACCESS, DATASET = "random access", "tf.data.Dataset"
PARTS = tuple(arrays.DTYPES)
"""The parts of an example: features, labels, weights."""


@dataclass(frozen=True)
class Leaf:
    """One array of an example."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FunctionRecord:
    """A dataset function.

    Attributes:
        name: `package.module:function`.
        form: the form of its result, `RANDOM_ACCESS` or `DATASET`.
        example: a `Leaf` or a dictionary of them for each of `PARTS` of an example.
        num_outputs: number of classes or of values to predict; a dictionary if labels are one.
        counts: number of examples of each split.
        counted: whether the examples were counted, because the datasets do not know their length.
    """

    name: str
    form: str
    example: Mapping[str, Named]
    num_outputs: Any
    counts: Mapping[str, int]
    counted: bool = False

    @property
    def version(self) -> str:
        """The first 12 digits of the sha256 of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def leaves(self) -> list[Leaf]:
        """All arrays of an example."""
        return [leaf for part in self.example.values() for leaf in named.leaves(part)]

    def __str__(self) -> str:
        features = named.leaves(self.example["features"])
        shapes = ", ".join(f"{list(leaf.shape)} {leaf.dtype}" for leaf in features)
        counted = " (counted)" if self.counted else ""
        return (
            f"{self.name} {self.version}: {self.counts['train']} examples to train, {self.counts['test']} to test"
            f"{counted}, each {shapes}, read by each task by {self.form}"
        )


def read_record(data_dir: Path, name: str, version: str = "") -> FunctionRecord:
    """Find the record of a dataset function."""
    command = f"{COMMAND} data.examine --name {name}"
    version = version or store.read_pointer(data_dir, "functions", name, command)
    path = _record_file(data_dir, name, version)
    return store.read_index(
        path, _from_fields, f"{name} {version} was not examined in {data_dir}; run `{command}`", command
    )


def _from_fields(fields: dict[str, Any]) -> FunctionRecord:
    return FunctionRecord(**fields | {"example": {name: _read_part(part) for name, part in fields["example"].items()}})


def _read_part(part: Mapping[str, Any]) -> Named:
    if isinstance(part.get("shape"), list):  # a dictionary of arrays may have one with that name
        return Leaf(tuple(part["shape"]), part["dtype"])
    return {name: _read_part(leaf) for name, leaf in part.items()}


def write_record(data_dir: Path, record: FunctionRecord) -> None:
    """Write a record as the newest of its function."""
    write_json(_record_file(data_dir, record.name, record.version), asdict(record))
    store.write_pointer(data_dir, "functions", record.name, record.version)


def _record_file(data_dir: Path, name: str, version: str) -> Path:
    path = store.path_of(data_dir, "functions", name, version)
    return path.with_name(f"{path.name}.json")


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
        raise UsageError(
            f"--dataset {name!r} does not take (split, shard), which --source function passes; change it, or omit "
            "--source"
        )
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):  # autograph converts mapped functions also inside a graph
        returned = references.call_user_function("--dataset", name, function, split, shard)
    if isinstance(returned, tf.data.Dataset):
        return returned
    indexed = hasattr(type(returned), "__len__") and hasattr(type(returned), "__getitem__")
    if not indexed or isinstance(returned, Mapping | tuple | str | bytes | np.ndarray):
        raise UsageError(
            f"--dataset {name!r} returns a {type(returned).__name__} for {split!r}; expected a tf.data.Dataset, or an "
            "object with __len__ and __getitem__"
        )
    return returned


def split_example(subject: str, example: Any) -> tuple[Any, ...]:
    """Return the features, labels and optional weight of an example or of its specification."""
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        actual = f"{len(example)} parts" if isinstance(example, tuple | list) else type(example).__name__
        raise UsageError(f"{subject} is {actual}; expected (features, labels) or (features, labels, weight)")
    return tuple(example)


def describe_example(subject: str, example: tuple[Any, ...]) -> dict[str, Named]:
    """Describe an example for `FunctionRecord.example`, from NumPy arrays or a dataset's element specification."""

    def leaf(part: str, value: Any) -> Leaf:
        shape = value.shape
        if isinstance(shape, tf.TensorShape):
            if not shape.is_fully_defined():
                raise UsageError(f"{subject}: {part} of the shape {shape}; expected known sizes: use tf.ensure_shape")
            shape = shape.as_list()
        dtype = value.dtype.as_numpy_dtype if isinstance(value, tf.TensorSpec) else value.dtype
        return Leaf(tuple(shape), arrays.stored_dtype(f"{subject}: {part}", part, np.dtype(dtype)))

    described_parts = {}
    for part, values in zip(PARTS, example, strict=False):
        for value in named.leaves(values):
            if not isinstance(value, tf.TensorSpec | np.ndarray):
                raise UsageError(
                    f"{subject}: {part} are {type(values).__name__}; expected an array or a dictionary of arrays"
                )
        described_parts[part] = named.each(lambda value, part=part: leaf(part, value), values)
    if "weights" in described_parts and getattr(described_parts["weights"], "shape", None) != ():
        raise UsageError(f"{subject}: {show_example({'weights': described_parts['weights']})}; expected one number")
    return described_parts


def describe_dataset(name: str, split: str, dataset: tf.data.Dataset) -> dict[str, Named]:
    """Describe the examples of a dataset that a function returns for a split."""
    subject = f"--dataset {name!r}: {split} example"
    return describe_example(subject, split_example(subject, dataset.element_spec))


def show_example(example: Mapping[str, Named]) -> str:
    """Return the description of an example for messages."""
    return ", ".join(
        f"{part}{name} {list(leaf.shape)} {leaf.dtype}"
        for part, value in example.items()
        for name, leaf in named.in_words(value).items()
    )


def convert_to_arrays(subject: str, example: Any) -> tuple[Any, ...]:
    """Convert an example of a random-access source to NumPy arrays."""
    try:
        return tuple(named.each(np.asarray, part) for part in split_example(subject, example))
    except ClusterError:
        raise
    except Exception as error:  # the example may be of any class
        raise UsageError(f"{subject} cannot be converted to arrays: {described(error)}") from None
