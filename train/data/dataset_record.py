"""The record of a dataset: the form of its examples, and the files that hold them.

    <data_dir>/<kind>/<name>-<version>/<kind>.json    the record, in the folder of the files that it lists
    <data_dir>/<kind>/<name>-<version>.json           the record of a dataset without files
    <data_dir>/<kind>/<name>.json                     the newest version

There are three kinds:

- arrays, for a dataset that fits in memory: a file for each array of a split, in C order, little endian, without a
  header. Tasks read them inside their graph (`train.data.feeds.load_examples`), as remote parameter-server workers
  must. That takes 0.1 s; decoding TFDS's 60,000 PNGs would take 5 s at every start of every task.
- shards, read as a stream: files of TFRecords. Example i is in shard i modulo the number of shards. A record is a
  `tf.train.Example` of `features` (the bytes of an array, in C order, little endian), `label` and an optional `weight`.
  Images are stored as bytes, because a PNG takes more than 0.1 ms to decode in every epoch.
- a function, which has no files (`train/data/function/reading.py`).

Standard library only: finding and verifying prepared data needs neither NumPy nor TensorFlow.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cluster.system.errors import ClusterError, RunFailed, UsageError, nearest
from cluster.system.files import sha256
from cluster.system.messages import COMMAND
from train import named
from train.data import store
from train.named import Named

if TYPE_CHECKING:
    import numpy as np

DTYPES = {"features": ("uint8", "int32", "int64", "float32"), "labels": ("int64", "float32"), "weights": ("float32",)}
PARTS = tuple(DTYPES)
SPLITS = ("train", "test")
STORED = {
    "bool": "uint8",
    "int8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "float16": "float32",
    "bfloat16": "float32",
    "float64": "float32",
}
"""The types in which features of other types are stored; only float64 loses precision."""
ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4}

COMMANDS = {"arrays": "data.prepare", "shards": "data.shard", "functions": "data.examine"}
"""The command that prepares a dataset of each kind."""

VERSIONS = {"fashion_mnist": "3.0.1", "mnist": "3.0.1", "jargon_file": "4.4.7"}
"""The known datasets and their versions; other versions may order their examples differently."""

WINDOW = 1024
"""Bytes per prepared example of a text; training cuts them into contexts."""

TEXTS = ("jargon_file",)
"""Text datasets: features are bytes, and labels the bytes that follow."""

BLOCK_BYTES = 4 << 20
"""Size of the blocks that are checked separately, see `train/data/blocks.py`; a file's last one may be smaller."""


@dataclass(frozen=True)
class Leaf:
    """One array of an example."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Leaf:
        return cls(tuple(entry["shape"]), entry["dtype"])


@dataclass(frozen=True)
class DataFile:
    """A file of a split: an array of all examples, or all parts of some examples."""

    path: Path
    num_examples: int
    size_bytes: int
    sha256: str
    blocks: tuple[int, ...]
    """The hash of each block, see `train/data/blocks.py`."""

    @classmethod
    def from_entry(cls, folder: Path, entry: Mapping[str, Any], num_examples: int, size_bytes: int) -> DataFile:
        """Return the file in `folder` that an entry of a record describes."""
        blocks = tuple(int(digits, 16) for digits in entry["blocks"].split())
        if len(blocks) != -(-size_bytes // BLOCK_BYTES):
            raise ValueError(f"{len(blocks)} blocks of {entry['file']}")
        return cls(folder / entry["file"], num_examples, size_bytes, entry["sha256"], blocks)


@dataclass(frozen=True)
class Split:
    """Examples to train on or to test on.

    Features are uint8, int32, int64 or float32; labels int64 (classes) or float32 (quantities); weights of examples, if
    there are any, one float32 each. Several features or labels are dictionaries, see `train/named.py`.
    """

    num_examples: int
    example: Mapping[str, Named]
    """A `Leaf`, or a dictionary of them, for each of the `PARTS` of an example."""
    files: tuple[DataFile, ...] = ()

    @property
    def leaves(self) -> list[Leaf]:
        """All arrays of an example, in the order of its parts."""
        return [leaf for part in self.example.values() for leaf in named.leaves(part)]

    @property
    def example_bytes(self) -> int:
        return sum(leaf.size_bytes for leaf in self.leaves)

    def join(self, values: Iterable[Any]) -> dict[str, Named]:
        """Return the parts of an example with its `leaves` replaced by these values, in order."""
        in_order = iter(values)
        return {name: named.each(lambda _: next(in_order), part) for name, part in self.example.items()}


@dataclass(frozen=True, kw_only=True)
class DatasetRecord(abc.ABC):
    """Metadata of a dataset, available without reading its examples.

    Attributes:
        classes: a tuple of class names; empty if they have no names, and for quantities.
        num_outputs: number of classes; for quantities, their number per example.
        source_files: the original files, below the data folder, with their sha256.
    """

    kind: ClassVar[str]
    name: str
    version: str
    classes: Named
    num_outputs: Named
    train: Split
    test: Split
    source_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, Split]:
        return {"train": self.train, "test": self.test}

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (*self.train.files, *self.test.files)

    @property
    def note(self) -> str:
        """Suffix of this dataset's description."""
        return ""

    def __str__(self) -> str:
        def describe_outputs(label: Leaf, count: int) -> str:
            singular, plural = ("output", "outputs") if label.dtype == "float32" else ("class", "classes")
            return f"{count} {singular if count == 1 else plural}"

        def listed(value: Named) -> str:
            return ", ".join(f"{name} {item}".strip() for name, item in named.in_words(value).items())

        features, labels = self.train.example["features"], self.train.example["labels"]
        outputs = named.each(describe_outputs, labels, self.num_outputs)
        return (
            f"{self.name} {self.version}: {self.train.num_examples} examples to train, {self.test.num_examples} to "
            f"test, each {listed(features)}, {listed(outputs)}{self.note}"
        )

    @classmethod
    def from_json(cls, folder: Path, value: Mapping[str, Any]) -> Self:
        parsed = {known.name: value[known.name] for known in fields(cls) if known.name in value}
        parsed |= {split: cls.parse_split(folder, value, split) for split in SPLITS}
        return cls(**parsed | {"classes": named.each(tuple, value["classes"])})

    @classmethod
    @abc.abstractmethod
    def parse_split(cls, folder: Path, value: Mapping[str, Any], split: str) -> Split:
        """Return a split from the JSON of the record."""

    @classmethod
    def path(cls, data_dir: Path, name: str, version: str) -> Path:
        return store.path_of(data_dir, cls.kind, name, version) / f"{cls.kind}.json"

    @classmethod
    def newest_version(cls, data_dir: Path, name: str) -> str:
        path, fix = store.pointer_of(data_dir, cls.kind, name), f"run `{command(cls.kind, name)}`"
        missing = f"{name} is not prepared: there is no {path}; {fix}"
        return store.read_index(path, lambda value: str(value["version"]), missing, fix)

    @classmethod
    def find(cls, data_dir: Path, name: str, version: str = "") -> Self:
        """Find a dataset, by default its newest version, and compare the size of every file with its record."""
        version = version or cls.newest_version(data_dir, name)
        path, fix = cls.path(data_dir, name, version), f"run `{command(cls.kind, name)}`"
        if is_user_dataset(name):  # the command may produce another version
            fix = f"copy {store.path_of(data_dir, cls.kind, name, version)}* from where it is, or {fix}"
        missing, again = f"{name} {version} is not prepared in {data_dir}; {fix}", advice(cls.kind, name)
        record = store.read_index(path, partial(cls.from_json, path.parent), missing, again)
        for file in record.files:
            size_bytes = file.path.stat().st_size if file.path.is_file() else 0
            if size_bytes != file.size_bytes:
                expected = f"expected {file.size_bytes} for {file.num_examples} examples"
                raise RunFailed(f"{file.path} has {size_bytes} bytes, {expected}; {again}")
        return record

    def verify(self, data_dir: Path) -> None:
        """Recompute the sha256 of every file, and of the original files that are there; report a line for each."""
        expected = {file.path: file.sha256 for file in self.files}
        expected |= {data_dir / name: digest for name, digest in self.source_files.items()}
        differing = []
        for path, digest in expected.items():
            if not path.exists():
                store.say(f"gone      {path} (not needed to train)")
            elif sha256(path) == digest:
                store.say(f"ok        {path}")
            else:
                store.say(f"DIFFERENT {path}")
                differing.append(str(path))
        if differing:
            raise RunFailed(f"{', '.join(differing)}: changed since they were prepared; {advice(self.kind, self.name)}")


@dataclass(frozen=True, kw_only=True)
class ArrayRecord(DatasetRecord):
    """A dataset in arrays; each file of a split holds one of its `leaves`, for all examples."""

    kind = "arrays"

    @classmethod
    def newest_version(cls, data_dir: Path, name: str) -> str:
        """Return the version to use: the known one of a TFDS dataset, or the newest prepared one of a user's."""
        if is_user_dataset(name):
            return super().newest_version(data_dir, name)
        if name not in VERSIONS:
            raise UsageError(f"unknown dataset {name!r}{nearest(name, VERSIONS)}; your own is package.module:function")
        return VERSIONS[name]

    @classmethod
    def parse_split(cls, folder: Path, value: Mapping[str, Any], split: str) -> Split:
        files = []

        def array(entry: Mapping[str, Any]) -> Leaf:
            count, *shape = entry["shape"]
            leaf = Leaf(tuple(shape), entry["dtype"])
            files.append(DataFile.from_entry(folder, entry, count, count * leaf.size_bytes))
            return leaf

        example = {name: parse_part(part, array) for name, part in value["splits"][split].items()}
        return Split(files[0].num_examples, example, tuple(files))

    def cut(self, context: int) -> ArrayRecord:
        """Return a text dataset cut to examples of `context` bytes, a divisor of `WINDOW`; other datasets unchanged."""
        if self.name not in TEXTS:
            return self

        def shorter(split: Split) -> Split:
            (window,) = split.example["features"].shape
            example = {name: Leaf((context,), leaf.dtype) for name, leaf in split.example.items()}
            return dataclasses.replace(split, num_examples=split.num_examples * window // context, example=example)

        return dataclasses.replace(self, train=shorter(self.train), test=shorter(self.test))


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


def command(kind: str, name: str) -> str:
    """Return the command that prepares a dataset."""
    return f"{COMMAND} {COMMANDS[kind]} --name {name}"


def advice(kind: str, name: str) -> str:
    """Return the advice about damaged files of a dataset."""
    return f"run `{command(kind, name)} --fresh`"


def is_user_dataset(name: str) -> bool:
    """Whether a name is a user's dataset, `package.module:function`."""
    return ":" in name


def parse_part(part: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Any]) -> Named:
    """Parse the JSON of a part of an example: the entry of one array, or a dictionary of them."""
    if isinstance(part.get("shape"), list | tuple):  # in a dictionary, `shape` may be an array's name
        return parse(part)
    return {name: parse(entry) for name, entry in part.items()}


def show_example(example: Mapping[str, Named]) -> str:
    """Return the description of an example for messages."""
    return ", ".join(
        f"{part}{name} {leaf}" for part, value in example.items() for name, leaf in named.in_words(value).items()
    )


def check_names(subject: str, value: Named) -> None:
    """Check that the arrays of a part of an example have names that a model's inputs and files can have."""
    if not isinstance(value, Mapping):
        return
    wrong = [name for name in value if not (isinstance(name, str) and name.isidentifier())]
    if wrong or not value:
        actual = f"the name {wrong[0]!r}" if wrong else "no name"
        raise UsageError(f"{subject} have {actual}; expected names of letters, digits and _, such as 'image'")


def stored_dtype(subject: str, part: str, dtype: np.dtype[Any]) -> str:
    """Return the storage type of an array of type `dtype` that is this part of a split, a key of `DTYPES`."""
    if part == "labels" and dtype.kind in "iub":
        return "int64"
    name = "float32" if part == "weights" and dtype.kind in "iub" else STORED.get(dtype.name, dtype.name)
    if name not in DTYPES[part]:
        text = dtype.kind in "OSUT"
        hint = "; turn text into whole numbers, see examples/text" if text else ""
        actual = "text or objects" if text else dtype.name
        raise UsageError(f"{subject} are {actual}; expected {' or '.join(DTYPES[part])}{hint}")
    return name


def values_in(shape: Sequence[int]) -> int:
    """Return the number of values that a model predicts for quantities, from the shape of an example's labels.

    With several axes, the model predicts the last axis at every position of the others.
    """
    return shape[-1] if shape else 1


def describe_ready(data_dir: Path, name: str, source: str) -> str:
    """Describe a prepared dataset; empty if it must be prepared, as a user's always is: its code may have changed."""
    if is_user_dataset(name):
        return ""
    try:
        return str((ShardRecord if source == "stream" else ArrayRecord).find(data_dir, name))
    except ClusterError:
        return ""  # preparing fixes or explains it
