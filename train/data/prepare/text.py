"""Texts as examples of the next byte: windows of bytes, and for each byte the following one.

The Jargon File 4.4.7 (in the public domain): 1.4 MB of English, from Debian's package `dict-jargon`. A text of TFDS,
such as `tiny_shakespeare`, comes through TFDS's own builder, see `tfds_dataset.TfdsText`.

Shapes: N windows, L bytes of each, V values of a byte.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from cluster.system.errors import PrerequisiteError
from train.data.arrays import WINDOW
from train.data.prepare.download import SourceFile

TEXTS = {
    "jargon_file": SourceFile(
        "jargon.dict", "", 1_418_350, "6c8118c277d0b00736d406d4941b77b69932d6ab125f7179ff88fe12939cc19e"
    )
}
"""The file of each known text."""
TFDS_TEXTS = ("tiny_shakespeare",)
"""Datasets of TFDS whose examples are texts."""
TEST_SHARE = 0.1
"""Share of the windows for testing, at the end of the text."""
BYTES = tuple(f"byte {value}" for value in range(256))
"""The names of the classes."""


class TextDataset:
    """One version of a text in a data folder; see `train.data.prepare.arrays.Dataset`."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self._file = TEXTS[name]
        self._path = data_dir / name / version / self._file.name

    def source_files(self) -> tuple[SourceFile, ...]:
        return (self._file,)

    def build(self, sources: Path, scratch: Path) -> None:  # noqa: ARG002  # the text needs no building
        shutil.rmtree(self._path.parent, ignore_errors=True)
        self._path.parent.mkdir(parents=True)
        os.replace(sources / self._file.name, self._path)

    def decode(self) -> tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the bytes' names and, for "train" and "test", uint8 bytes and the int64 ones after them, `[N, L]`."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            raise PrerequisiteError("none there") from None
        if len(text) != self._file.size_bytes:
            raise PrerequisiteError(f"{self._path} has {len(text)} bytes, not {self._file.size_bytes}")
        return BYTES, split(text)

    def files(self) -> tuple[Path, ...]:
        return (self._path,)


def split(text: bytes, window: int = WINDOW) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return windows to train on, and windows of the last part to test on; an incomplete window is left out."""
    features_NL, labels_NL = windows(text, window)
    train = len(features_NL) - max(1, round(TEST_SHARE * len(features_NL)))
    return {"train": (features_NL[:train], labels_NL[:train]), "test": (features_NL[train:], labels_NL[train:])}


def windows(text: bytes, window: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a text and the following bytes, uint8 and int64 `[N, L]`."""
    values = np.frombuffer(text, np.uint8)
    count = (len(values) - 1) // window
    features_NL = values[: count * window].reshape(count, window)
    return features_NL, values[1 : count * window + 1].reshape(count, window).astype(np.int64)
