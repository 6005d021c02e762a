"""Datasets of TensorFlow Datasets: decoded as a whole into arrays, or as a stream of examples to shard."""

import contextlib
import difflib
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from cluster.system.errors import PrerequisiteError, UsageError
from train.data import store
from train.data.prepare import download
from train.data.prepare.download import SourceFile
from train.data.prepare.jargon_file import Decoded

logging.set_verbosity(logging.ERROR)  # TFDS warns of every missing folder
tfds.disable_progress_bar()

_SHOWN = 300  # characters of TFDS's messages, which may be pages


class TfdsDataset:
    """One version of a TFDS dataset in a data folder. It never downloads: `build` takes the files."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self._name, self._version, self._data_dir = name, version, data_dir
        self._folder = Path(self._builder(data_dir).data_path)

    def source_files(self) -> tuple[SourceFile, ...]:
        """Return the original files, with the addresses and checksums that TFDS records."""
        infos = self._builder(self._data_dir).url_infos
        return tuple(SourceFile(info.filename, url, int(info.size), info.checksum) for url, info in infos.items())

    def build(self, sources: Path, scratch: Path) -> None:
        """Build the dataset from the files in `sources`, in `scratch`, and move it to its place when complete."""
        builder = self._builder(scratch / "tfds")
        with contextlib.redirect_stdout(io.StringIO()):  # it announces a download of unknown size
            builder.download_and_prepare(
                download_dir=scratch / "downloads",
                download_config=tfds.download.DownloadConfig(manual_dir=sources, try_download_gcs=False),
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(builder.data_path, self._folder)

    def decode(self) -> Decoded:
        """Return the class names, and images and labels of each split, in the order of the files on every machine."""
        builder = self._builder(self._data_dir)
        if not builder.is_prepared():
            raise PrerequisiteError("none there")
        splits = {}
        for split in ("train", "test"):
            try:
                examples = builder.as_dataset(split=split, batch_size=-1, shuffle_files=False)
            except tf.errors.OpError as error:
                raise PrerequisiteError(f"{self._folder} is damaged ({type(error).__name__})") from None
            expected = builder.info.splits[split].num_examples
            if len(examples["label"]) != expected:
                raise PrerequisiteError(f"{self._folder} has {len(examples['label'])} {split} examples, not {expected}")
            splits[split] = (examples["image"].numpy(), examples["label"].numpy())
        return tuple(builder.info.features["label"].names), splits

    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(self._folder.glob("*.tfrecord*")))

    def _builder(self, data_dir: Path) -> tfds.core.DatasetBuilder:
        # `tfds.builder` would read an existing dataset from its files and not know the addresses.
        return tfds.builder_cls(self._name)(version=self._version, data_dir=data_dir)


class TfdsSource:
    """The examples of a dataset to shard; its methods are those of `train.data.prepare.sharding.Arrays`."""

    def __init__(self, name: str, data_dir: Path, *, resized: bool) -> None:
        try:
            self._builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError:
            near = difflib.get_close_matches(name, tfds.list_builders(), n=1)
            advice = f"did you mean {near[0]!r}?" if near else "see https://www.tensorflow.org/datasets"
            raise UsageError(f"TFDS has no dataset {name!r}; {advice}") from None
        except ValueError as error:  # an unknown configuration or version
            raise UsageError(f"TFDS cannot read the name {name!r}: {_short(error)}") from None
        self._name = name
        self.version = str(self._builder.version)
        keys = self._builder.info.supervised_keys
        if keys is None or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
            raise UsageError(f"{name} has no single feature and label (supervised_keys {keys}); choose another dataset")
        features, labels = (self._builder.info.features[key] for key in keys)
        for key, feature in zip(keys, (features, labels), strict=True):
            if not isinstance(feature.shape, tuple) or np.dtype(feature.np_dtype).kind == "O":
                raise UsageError(f"{name} has a {key} that is text or a structure, not numbers; choose another dataset")
        if None in features.shape and not (resized and isinstance(features, tfds.features.Image)):
            image = isinstance(features, tfds.features.Image)
            fix = "resize its images: --size PIXELS" if image else "choose another dataset"
            raise UsageError(f"{name} has features {list(features.shape)} without a fixed size; {fix}")
        self.classes = tuple(labels.names) if isinstance(labels, tfds.features.ClassLabel) else ()

    def open(self) -> Mapping[str, int]:
        if not self._builder.is_prepared():
            self._download()
        known = self._builder.info.splits
        test = next((split for split in ("test", "validation") if split in known and self._is_labelled(split)), None)
        if "train" not in known or test is None:
            raise UsageError(
                f"{self._name} has the splits {', '.join(sorted(known))}; expected train, and test or validation with "
                "labels; choose another dataset"
            )
        self._names = {"train": "train", "test": test}
        return {split: known[name].num_examples for split, name in self._names.items()}

    def _is_labelled(self, split: str) -> bool:
        """Whether the first example has a label: competitions keep those of their test split, as -1."""
        first = self._builder.as_dataset(split=f"{split}[:1]", as_supervised=True)
        return all(np.min(label) >= 0 for _, label in tfds.as_numpy(first) if np.asarray(label).dtype.kind == "i")

    def examples(self, split: str) -> Iterator[tuple[Any, ...]]:
        dataset = self._builder.as_dataset(split=self._names[split], shuffle_files=False, as_supervised=True)
        yield from tfds.as_numpy(dataset)

    def _download(self) -> None:
        store.say(f"TFDS downloads and builds {self._name} {self.version}")
        try:
            for url in list(getattr(self._builder, "url_infos", None) or {})[:1]:
                download.probe(url)  # TFDS retries for minutes without internet
            with contextlib.redirect_stdout(io.StringIO()):
                self._builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
                raise  # an error of this machine's disk
            raise PrerequisiteError(
                f"TFDS cannot get {self._name}: {_short(error)}; connect this machine or choose another dataset"
            ) from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_SHOWN] or type(error).__name__
