"""The Jargon File 4.4.7 (in the public domain): 1.4 MB of English, from Debian's package `dict-jargon`.

An example is a window of bytes, and its labels are the following bytes.

Shapes: N windows, L bytes of a window.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from cluster.system.errors import PrerequisiteError
from cluster.system.files import sha256
from train.data.dataset_record import WINDOW
from train.data.prepare.download import SourceFile

NAME = "jargon_file"
FILE = SourceFile("jargon.dict", "", 1_418_350, "6c8118c277d0b00736d406d4941b77b69932d6ab125f7179ff88fe12939cc19e")
TEST_SHARE = 0.1
"""Share of the windows for testing, at the end."""
BYTES = tuple(f"byte {value}" for value in range(256))

Decoded = tuple[tuple[str, ...], dict[str, tuple[np.ndarray, np.ndarray]]]
"""The names of the classes; features and labels of "train" and "test"."""


class JargonFile:
    """The text in a data folder; its methods are those of `train.data.prepare.tfds_datasets.TfdsDataset`."""

    def __init__(self, name: str, version: str, data_dir: Path) -> None:
        self._path = data_dir / name / version / FILE.name

    def source_files(self) -> tuple[SourceFile, ...]:
        return (FILE,)

    def build(self, sources: Path, scratch: Path) -> None:  # noqa: ARG002  # the file is used as it is
        shutil.rmtree(self._path.parent, ignore_errors=True)
        self._path.parent.mkdir(parents=True)
        os.replace(sources / FILE.name, self._path)

    def decode(self) -> Decoded:
        if not self._path.exists():
            raise PrerequisiteError("none there")
        if sha256(self._path) != FILE.sha256:
            raise PrerequisiteError(f"{self._path} is damaged")
        return BYTES, split_text(self._path.read_bytes())

    def files(self) -> tuple[Path, ...]:
        return (self._path,)


def split_text(text: bytes, window: int = WINDOW) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return windows to train on, and windows of the last part to test on; an incomplete window is left out.

    Features are the bytes of a window, uint8 `[N, L]`, and labels the following bytes, int64 `[N, L]`.
    """
    values = np.frombuffer(text, np.uint8)
    count = (len(values) - 1) // window
    features_NL = values[: count * window].reshape(count, window)
    labels_NL = values[1 : count * window + 1].reshape(count, window).astype(np.int64)
    train = len(features_NL) - max(1, round(TEST_SHARE * len(features_NL)))
    return {"train": (features_NL[:train], labels_NL[:train]), "test": (features_NL[train:], labels_NL[train:])}
