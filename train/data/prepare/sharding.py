"""Writes the TFRecord shards of a dataset that is prepared as arrays, or of any other TFDS dataset.

fashion_mnist, mnist and users' datasets come from their arrays, so that shards have the same examples in the same
order. All others come from TFDS, which downloads them. For their form see `train/data/dataset_record.py`.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from train.data import blocks, store
from train.data.dataset_record import PARTS, VERSIONS, ArrayRecord, Leaf, ShardRecord, is_user_dataset, show_example
from train.data.prepare.preparation import prepare_dataset
from train.data.user_dataset import array_of

if TYPE_CHECKING:
    from train.data.prepare.tfds_datasets import TfdsSource

MAX_SHARDS = 512  # all are open while they are written, and Linux allows a process 1024 open files
DEFAULT_SHARDS = 8
MAX_SIZE = 4096

Example = tuple[Any, ...]
"""Features, label and an optional weight."""


def write_shards(
    name: str, data_dir: Path, *, num_shards: int | None = None, size: int | None = None, fresh: bool = False
) -> ShardRecord:
    """Return the shards of a dataset in `data_dir`; write them unless they exist as requested.

    One rename replaces earlier shards. Each split has `num_shards` shards, 1 to `MAX_SHARDS`, or one for each example
    if there are fewer; None for the existing number, or `DEFAULT_SHARDS`. Images are resized to `size` times `size`
    pixels; None keeps their size.
    """
    for option, value, most in (("--shards", num_shards, MAX_SHARDS), ("--size", size, MAX_SIZE)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{option} {value}: expected a whole number from 1 to {most}")
    if not fresh and num_shards is None:
        with contextlib.suppress(PrerequisiteError, RunFailed):
            existing = ShardRecord.find(data_dir, name).asked
            num_shards, size = existing["num_shards"], existing["size"] if size is None else size
    num_shards = num_shards or DEFAULT_SHARDS
    asked = {"num_shards": num_shards, "size": size}
    source = _open_source(name, data_dir, size)
    # Runs find the examples they began with, also after a sharding at another size.
    version = source.version if size is None else f"{source.version}-{size}px"
    with store.lock(data_dir):
        if not fresh:
            with contextlib.suppress(PrerequisiteError, RunFailed):  # damaged shards are written again
                record = ShardRecord.find(data_dir, name)
                if (record.version, record.asked) == (version, asked):
                    return record
        counts = source.open()
        store.say(f"sharding {name} {version}: {counts['train']} examples to train, {counts['test']} to test")
        with store.new_folder(data_dir, "shards", name, version) as folder:
            index = _write(folder, source, counts, num_shards, size)
            index = {"name": name, "version": version, "classes": source.classes, "asked": asked, **index}
            (folder / "shards.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        store.write_pointer(data_dir, "shards", name, version)
    return ShardRecord.find(data_dir, name, version)


def _open_source(name: str, data_dir: Path, size: int | None) -> "Arrays | TfdsSource":
    if is_user_dataset(name) or name in VERSIONS:
        return Arrays(prepare_dataset(name, data_dir))
    from train.data.prepare.tfds_datasets import TfdsSource  # imports TFDS, which takes seconds

    return TfdsSource(name, data_dir, resized=size is not None)


class Arrays:
    """The examples of a dataset that is prepared as arrays."""

    def __init__(self, record: ArrayRecord) -> None:
        if named := [part for part, value in record.train.example.items() if isinstance(value, Mapping)]:
            raise UsageError(
                f"dataset {record.name}: {' and '.join(named)} are dictionaries, and shards hold one array of each; "
                "use a function of (split, shard) with --source function, or omit --source"
            )
        self.version, self.classes, self._splits = record.version, record.classes, record.splits

    def open(self) -> Mapping[str, int]:
        """Return the numbers of "train" and "test"."""
        return {name: split.num_examples for name, split in self._splits.items()}

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the examples of a split, in the same order every time."""
        columns, parts = [], 3 if split == "train" else 2  # weights are for training only
        for file, leaf in zip(self._splits[split].files[:parts], self._splits[split].leaves[:parts], strict=True):
            blocks.check_blocks(file.path, file.blocks)
            dtype, shape = np.dtype(leaf.dtype).newbyteorder("<"), (file.num_examples, *leaf.shape)
            columns.append(np.memmap(file.path, dtype, "r", shape=shape))
        return zip(*columns, strict=True)


@dataclass
class _Layout:
    """The form of the first example, which all examples must have."""

    size: int | None
    example: dict[str, Leaf] = field(default_factory=dict)
    max_label: int = 0
    """The largest label of the examples so far."""

    def check(self, subject: str, example: Example) -> tuple[np.ndarray, ...]:
        values = [resize_image(subject, example[0], self.size), *example[1:]]
        parts = tuple(
            array_of(f"{subject}: {part}", part, np.asarray(value)[None])[0]
            for part, value in zip(PARTS, values, strict=False)
        )
        current = {part: Leaf(array.shape, array.dtype.name) for part, array in zip(PARTS, parts, strict=False)}
        self.example = self.example or current
        expected = {part: leaf for part, leaf in self.example.items() if part in current}
        if current != expected:
            raise UsageError(
                f"{subject}: {show_example(current)}; expected {show_example(expected)}, like the first example"
            )
        label = parts[1]
        if label.ndim > 1 or (label.dtype == np.int64 and label.min() < 0):
            raise UsageError(f"{subject}: label {label.tolist()}; expected a number or a list of them, classes from 0")
        if label.dtype == np.int64:
            self.max_label = max(self.max_label, int(label.max()))
        return parts

    def to_json(self, num_classes: int) -> dict[str, Any]:
        labels = self.example["labels"]
        return {
            "features": asdict(self.example["features"]),
            "labels": asdict(labels),
            "weighted": "weights" in self.example,
            "num_outputs": math.prod(labels.shape) if labels.dtype == "float32" else num_classes or self.max_label + 1,
        }


def resize_image(subject: str, image: Any, size: int | None) -> np.ndarray:
    """Resize an image `[H, W, C] uint8` to `size` times `size` pixels, if a size is requested."""
    image = np.asarray(image)
    if size is None or image.shape[:2] == (size, size):
        return image
    if image.ndim != 3 or image.dtype != np.uint8:
        raise UsageError(f"--size {size}: {subject} is {list(image.shape)} {image.dtype}, not an image; omit --size")
    scaled = tf.image.resize(image, [size, size], antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(scaled), 0, 255), tf.uint8).numpy()


def _write(
    folder: Path, source: "Arrays | TfdsSource", counts: Mapping[str, int], num_shards: int, size: int | None
) -> dict[str, Any]:
    layout, splits = _Layout(size), {}
    for split, count in counts.items():
        if count == 0:
            raise UsageError(f"there is no {split} example; choose another dataset")
        total = min(num_shards, count)
        paths = [folder / f"{split}-{number:05}-of-{total:05}.tfrecord" for number in range(total)]
        written = _write_split(f"{split} example", source.examples(split), paths, layout)
        splits[split] = [
            {"file": path.name, "examples": number, "bytes": path.stat().st_size, **blocks.digests(path)}
            for path, number in zip(paths, written, strict=True)
        ]
    return {**layout.to_json(len(source.classes)), "splits": splits}


def _write_split(subject: str, examples: Iterator[Example], paths: list[Path], layout: _Layout) -> list[int]:
    written = [0] * len(paths)
    try:
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(tf.io.TFRecordWriter(str(path))) for path in paths]
            for number, example in enumerate(examples):
                at = number % len(paths)
                writers[at].write(_record(layout.check(f"{subject} {number}", example)))
                written[at] += 1
    except tf.errors.ResourceExhaustedError:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    return written


def _record(parts: tuple[np.ndarray, ...]) -> bytes:
    features, label, *weight = parts
    little_endian = features.astype(features.dtype.newbyteorder("<"), copy=False).tobytes()
    fields = {"features": tf.train.Feature(bytes_list=tf.train.BytesList(value=[little_endian]))}
    if label.dtype == np.int64:
        fields["label"] = tf.train.Feature(int64_list=tf.train.Int64List(value=label.reshape(-1)))
    else:
        fields["label"] = tf.train.Feature(float_list=tf.train.FloatList(value=label.reshape(-1)))
    if weight:
        fields["weight"] = tf.train.Feature(float_list=tf.train.FloatList(value=weight[0].reshape(-1)))
    return tf.train.Example(features=tf.train.Features(feature=fields)).SerializeToString(deterministic=True)
