"""Calls a dataset function, checks its result, and keeps a record of the function that was examined before the run.

    def my_data(split, shard):
        return ...  # a tf.data.Dataset of the shard's examples, or an object with __len__ and __getitem__

An example is `(features, labels)` or `(features, labels, weight)`; features and labels are arrays or dictionaries of
arrays, of the types of `train.data.dataset_record.DTYPES`. Every task compares the function's result with the record.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx  # has no public name

from cluster.system.errors import UsageError
from train import named
from train.data import store
from train.data.dataset_record import PARTS, DatasetRecord, Leaf, Split, parse_part, show_example, stored_dtype
from train.named import Named
from train.settings import references

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
        raise UsageError(
            f"--dataset {name!r} does not take (split, shard), which --source function passes; change it, or omit "
            "--source"
        )
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):  # makes autograph convert mapped functions in graphs, too
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
    """Describe an example for `Split.example`, from NumPy arrays or a dataset's element specification."""

    def leaf(part: str, value: Any) -> Leaf:
        shape = value.shape
        if isinstance(shape, tf.TensorShape):
            if not shape.is_fully_defined():
                raise UsageError(f"{subject}: {part} of the shape {shape}; expected known sizes: use tf.ensure_shape")
            shape = shape.as_list()
        dtype = value.dtype.as_numpy_dtype if isinstance(value, tf.TensorSpec) else value.dtype
        return Leaf(tuple(shape), stored_dtype(f"{subject}: {part}", part, np.dtype(dtype)))

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


def convert_to_arrays(subject: str, example: Any) -> tuple[Any, ...]:
    """Convert an example of a random-access source to NumPy arrays."""
    with references.user_errors(f"{subject} cannot be converted to arrays"):
        return tuple(named.each(np.asarray, part) for part in split_example(subject, example))
