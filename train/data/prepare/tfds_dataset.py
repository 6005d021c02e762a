"""Datasets of TensorFlow Datasets: their files, building and decoding."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from cluster.system.errors import PrerequisiteError
from train.data.prepare import text
from train.data.prepare.download import SourceFile

logging.set_verbosity(logging.ERROR)  # TFDS warns of every missing folder
tfds.disable_progress_bar()

WORDS, VOCABULARY = 200, 20_000
"""Number of words of a review, and number of word ids."""


class TfdsDataset:
    """One version of a TFDS dataset in a data folder. It never downloads: `build` takes the files."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self._name = name
        self._version = version
        self._data_dir = data_dir
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

    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the class names and, for "train" and "test", images `[N, H, W, C] uint8` and labels `[N] int64`.

        The order is that of the TFDS files, which is the same on every machine.
        """
        builder = self._built()
        splits = {}
        for split in ("train", "test"):
            examples = self._read(builder, split)
            expected = builder.info.splits[split].num_examples
            if len(examples["label"]) != expected:
                raise PrerequisiteError(f"{self._folder} has {len(examples['label'])} {split} examples, not {expected}")
            splits[split] = (examples["image"].numpy(), examples["label"].numpy())
        return tuple(builder.info.features["label"].names), splits

    def files(self) -> tuple[Path, ...]:
        """Return the files of the built dataset that hold its examples."""
        return tuple(sorted(self._folder.glob("*.tfrecord*")))

    def _built(self) -> tfds.core.DatasetBuilder:
        builder = self._builder(self._data_dir)
        if not builder.is_prepared():
            raise PrerequisiteError("none there")
        return builder

    def _read(self, builder: tfds.core.DatasetBuilder, split: str) -> dict[str, tf.Tensor]:
        try:
            return builder.as_dataset(split=split, batch_size=-1, shuffle_files=False)
        except tf.errors.OpError as error:
            raise PrerequisiteError(f"{self._folder} is damaged ({type(error).__name__})") from None

    def _builder(self, data_dir: Path) -> tfds.core.DatasetBuilder:
        # `tfds.builder` would read an existing dataset from its files and not know the addresses.
        return tfds.builder_cls(self._name)(version=self._version, data_dir=data_dir)


class TfdsText(TfdsDataset):
    """A dataset of texts, as windows of bytes."""

    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the bytes' names and, for "train" and "test", uint8 bytes and the int64 ones after them, `[N, L]`."""
        builder = self._built()
        texts = {split: b"".join(self._read(builder, split)["text"].numpy()) for split in ("train", "test")}
        return text.BYTES, {split: text.windows(content) for split, content in texts.items()}


class TfdsReviews(TfdsDataset):
    """IMDB's film reviews, as ids of their words."""

    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the class names and, for "train" and "test", words `[N, WORDS] int32` and labels `[N] int64`."""
        builder = self._built()
        splits = {}
        for split in ("train", "test"):
            examples = self._read(builder, split)
            words_NT = np.array([numbered(review) for review in examples["text"].numpy()], np.int32)
            splits[split] = (words_NT, examples["label"].numpy())
        return tuple(builder.info.features["label"].names), splits


def numbered(review: bytes) -> list[int]:
    """Return the ids of the first `WORDS` words of a review, padded with zeros.

    The id of a word is a hash of it, 1 to `VOCABULARY` - 1, so that the model does not need a vocabulary.
    """
    words = re.findall(rb"[a-z0-9']+", review.lower().replace(b"<br />", b" "))[:WORDS]
    return [1 + zlib.crc32(word) % (VOCABULARY - 1) for word in words] + [0] * (WORDS - len(words))
