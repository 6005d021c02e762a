"""Tables of measurements, a line of a CSV file for each example.

The diagnoses of breast cancer of Wisconsin (W. Street, W. Wolberg and O. Mangasarian, UCI Machine Learning Repository,
https://doi.org/10.24432/C5DW2B, CC BY 4.0): 569 tumours, 30 numbers of each. From Debian's package `python3-sklearn`.

Shapes: N examples, C columns.
"""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path

import numpy as np

from cluster.system.errors import PrerequisiteError
from cluster.system.files import sha256
from train.data.prepare.download import SourceFile

TABLES = {
    "breast_cancer": SourceFile(
        "breast_cancer.csv", "", 119_913, "fed3eb72d0575ef6192293f5093c6e801b1476b577d0386bf4455504522172ed"
    )
}
"""The file of each known table: a line with the numbers of rows and columns and the names of the classes,
then columns and the class of every example."""
TEST_EVERY = 5
"""One of this many examples, the first, is for testing."""


class TableDataset:
    """One version of one table in one data folder; see `train.data.prepare.arrays.Dataset`."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self._file = TABLES[name]
        self._path = data_dir / name / version / self._file.name

    def source_files(self) -> tuple[SourceFile, ...]:
        return (self._file,)

    def build(self, sources: Path, scratch: Path) -> None:  # noqa: ARG002  # a table needs no building
        shutil.rmtree(self._path.parent, ignore_errors=True)
        self._path.parent.mkdir(parents=True)
        os.replace(sources / self._file.name, self._path)

    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the class names and, for "train" and "test", columns `[N, C] float32` and labels `[N] int64`."""
        if not self._path.exists():
            raise PrerequisiteError("none there")
        if sha256(self._path) != self._file.sha256:
            raise PrerequisiteError(f"{self._path} is damaged")
        return split(self._path)

    def files(self) -> tuple[Path, ...]:
        return (self._path,)


def split(path: Path) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the class names of a table, and its examples for training and testing."""
    with path.open(encoding="utf-8", newline="") as file:
        (_, _, *classes), *rows = csv.reader(file)
    table = np.array(rows, np.float64)
    features_NC, labels_N = table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64)
    held_out = np.arange(len(table)) % TEST_EVERY == 0
    parts = {"train": ~held_out, "test": held_out}
    return tuple(classes), {name: (features_NC[part], labels_N[part]) for name, part in parts.items()}
