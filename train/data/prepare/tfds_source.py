"""Any dataset of TFDS as a stream of examples to shard, which TFDS downloads and builds, in its order."""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from cluster.system.errors import PrerequisiteError, UsageError
from train.data.prepare import download
from train.data.prepare.arrays import say

logging.set_verbosity(logging.ERROR)  # TFDS warns of every missing folder
tfds.disable_progress_bar()

_SHOWN = 300  # characters of TFDS's messages, which may be pages


class TfdsSource:
    """See `train.data.prepare.sharding.Source`."""

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
        self._names = _splits(self._name, self._builder.info.splits)
        return {split: self._builder.info.splits[name].num_examples for split, name in self._names.items()}

    def examples(self, split: str) -> Iterator[tuple[Any, ...]]:
        dataset = self._builder.as_dataset(split=self._names[split], shuffle_files=False, as_supervised=True)
        yield from tfds.as_numpy(dataset)

    def _download(self) -> None:
        say(f"TFDS downloads and builds {self._name} {self.version}")
        try:
            for url in list(getattr(self._builder, "url_infos", None) or {})[:1]:
                download.probe(url)  # TFDS retries for minutes without internet
            with contextlib.redirect_stdout(io.StringIO()):
                self._builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except OSError as error:
            if error.errno is not None and error.filename is not None:
                raise  # an error of this machine's disk
            raise self._unavailable(error) from None
        except Exception as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> PrerequisiteError:
        return PrerequisiteError(
            f"TFDS cannot get {self._name}: {_short(error)}; connect this machine or choose another dataset"
        )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_SHOWN] or type(error).__name__


def _splits(name: str, known: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the splits to train on and to test on."""
    test = next((split for split in ("test", "validation") if split in known), None)
    if "train" not in known or test is None:
        raise UsageError(
            f"{name} has the splits {', '.join(sorted(known))}; expected train, and test or validation; "
            "choose another dataset"
        )
    return {"train": "train", "test": test}
