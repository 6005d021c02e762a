"""Datasets of one file from a Debian package: texts as windows of bytes, and tables.

The Jargon File 4.4.7 (in the public domain): 1.4 MB of English, from `dict-jargon`. An example is a window of bytes,
and its labels are the following bytes.

The diagnoses of breast cancer of Wisconsin (W. Street, W. Wolberg and O. Mangasarian, UCI Machine Learning Repository,
https://doi.org/10.24432/C5DW2B, CC BY 4.0): 569 tumours, 30 numbers of each, from `python3-sklearn`. The file has a
line with the numbers of rows and columns and the names of the classes, then a line for each example: columns and class.

Shapes: N windows or examples, L bytes of a window, C columns.
"""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import numpy as np

from cluster.system.errors import PrerequisiteError
from cluster.system.files import sha256
from train.data.arrays import WINDOW
from train.data.prepare.download import SourceFile

FILES = {
    "jargon_file": SourceFile(
        "jargon.dict", "", 1_418_350, "6c8118c277d0b00736d406d4941b77b69932d6ab125f7179ff88fe12939cc19e"
    ),
    "breast_cancer": SourceFile(
        "breast_cancer.csv", "", 119_913, "fed3eb72d0575ef6192293f5093c6e801b1476b577d0386bf4455504522172ed"
    ),
}
"""The file of each dataset."""
TEST_SHARE = 0.1
"""Share of a text's windows for testing, at its end."""
TEST_EVERY = 5
"""One of this many examples of a table, the first, is for testing."""
BYTES = tuple(f"byte {value}" for value in range(256))
"""The names of a text's classes."""

Decoded = tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]
"""The names of the classes; features and labels of "train" and "test"."""


class PackagedDataset:
    """One version of a dataset in a data folder; see `train.data.prepare.preparation.Dataset`."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self._file = FILES[name]
        self._path = data_dir / name / version / self._file.name

    def source_files(self) -> tuple[SourceFile, ...]:
        return (self._file,)

    def build(self, sources: Path, scratch: Path) -> None:  # noqa: ARG002  # the file is used as it is
        shutil.rmtree(self._path.parent, ignore_errors=True)
        self._path.parent.mkdir(parents=True)
        os.replace(sources / self._file.name, self._path)

    def decode(self) -> Decoded:
        if not self._path.exists():
            raise PrerequisiteError("none there")
        if sha256(self._path) != self._file.sha256:
            raise PrerequisiteError(f"{self._path} is damaged")
        return split_table(self._path) if self._path.suffix == ".csv" else (BYTES, split_text(self._path.read_bytes()))

    def files(self) -> tuple[Path, ...]:
        return (self._path,)


def split_text(text: bytes, window: int = WINDOW) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return windows to train on, and windows of the last part to test on; an incomplete window is left out."""
    features_NL, labels_NL = cut_windows(text, window)
    train = len(features_NL) - max(1, round(TEST_SHARE * len(features_NL)))
    return {"train": (features_NL[:train], labels_NL[:train]), "test": (features_NL[train:], labels_NL[train:])}


def cut_windows(text: bytes, window: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a text and the following bytes, uint8 and int64 `[N, L]`."""
    values = np.frombuffer(text, np.uint8)
    count = (len(values) - 1) // window
    features_NL = values[: count * window].reshape(count, window)
    return features_NL, values[1 : count * window + 1].reshape(count, window).astype(np.int64)


def split_table(path: Path) -> Decoded:
    """Return the class names of a table, and its examples: columns `[N, C] float32` and labels `[N] int64`."""
    with path.open(encoding="utf-8", newline="") as file:
        (_, _, *classes), *rows = csv.reader(file)
    table = np.array(rows, np.float64)
    features_NC, labels_N = table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64)
    held_out = np.arange(len(table)) % TEST_EVERY == 0
    parts = {"train": ~held_out, "test": held_out}
    return tuple(classes), {name: (features_NC[part], labels_N[part]) for name, part in parts.items()}
