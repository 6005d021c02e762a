"""The prepared arrays: written whole or not at all, found with their sizes checked, verified byte by byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import PrerequisiteError, RunFailed, UsageError
from train.data import arrays

IMAGES = np.arange(5 * 4 * 4 * 1, dtype=np.uint8).reshape(5, 4, 4, 1)
LABELS = np.array([3, 1, 4, 1, 5], np.int64)


def write(data_dir: Path, images: np.ndarray = IMAGES) -> arrays.ArraySet:
    scratch = data_dir / "scratch"
    scratch.mkdir(parents=True)
    splits = {"train": (images, LABELS[: len(images)]), "test": (images[:2], LABELS[:2])}
    classes = tuple("0123456789")
    try:
        return arrays.write(
            scratch, data_dir, "mnist", classes=classes, splits=splits, source="a test", source_files={}
        )
    finally:
        shutil.rmtree(scratch)


def test_what_is_found_is_what_was_written(tmp_path: Path) -> None:
    written = write(tmp_path)
    found = arrays.find(tmp_path, "mnist")
    assert written == found
    assert ("mnist", "3.0.1", 10, "a test") == (found.name, found.version, found.num_classes, found.source)
    assert (5, 2) == (found.train.num_examples, found.test.num_examples)
    assert (5, 4, 4, 1) == found.train.images.shape
    assert IMAGES.tobytes() == found.train.images.path.read_bytes()
    assert LABELS.astype("<i8").tobytes() == found.train.labels.path.read_bytes()
    assert tmp_path / "arrays" / "mnist-3.0.1" / "test_labels.bin" == found.test.labels.path


def test_writing_again_replaces(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, IMAGES[:3])
    assert 3 == arrays.find(tmp_path, "mnist").train.num_examples
    assert ["mnist-3.0.1"] == [path.name for path in (tmp_path / "arrays").iterdir()]


def test_the_wrong_type_is_refused_and_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train_images\.bin must be uint8, not float32"):
        write(tmp_path, IMAGES.astype(np.float32))
    with pytest.raises(PrerequisiteError):
        arrays.find(tmp_path, "mnist")


def test_nothing_prepared_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"mnist 3\.0\.1 is not prepared in .*; run `invoke data\.prepare"):
        arrays.find(tmp_path, "mnist")


def test_an_unknown_name_offers_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown dataset 'fashion-mnist'; did you mean 'fashion_mnist'"):
        arrays.find(tmp_path, "fashion-mnist")


@pytest.mark.parametrize("size", [0, 79, 81])
def test_a_file_of_the_wrong_size_is_named_with_both_sizes(tmp_path: Path, size: int) -> None:
    path = write(tmp_path).train.images.path
    path.write_bytes(bytes(size))
    with pytest.raises(RunFailed) as error:
        arrays.find(tmp_path, "mnist")
    expected = f"{path} has {size} bytes, expected 80 for [5, 4, 4, 1]; run `invoke data.prepare --name mnist --fresh`"
    assert expected == str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path).test.labels.path.unlink()
    with pytest.raises(RunFailed, match=r"test_labels\.bin has 0 bytes, expected 16"):
        arrays.find(tmp_path, "mnist")


@pytest.mark.parametrize("index", ["", "{", "{}", "[]", "null"])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, index: str) -> None:
    write(tmp_path)
    (tmp_path / "arrays" / "mnist-3.0.1" / "arrays.json").write_text(index)
    with pytest.raises(RunFailed, match=r"arrays\.json cannot be read .* --fresh`"):
        arrays.find(tmp_path, "mnist")


def test_verify_says_a_line_for_each_file(tmp_path: Path) -> None:
    lines: list[str] = []
    arrays.verify(write(tmp_path), lines.append)
    assert ["ok"] * 4 == [line.split()[0] for line in lines]


def test_verify_names_the_file_of_which_one_byte_differs(tmp_path: Path) -> None:
    path = write(tmp_path).test.images.path
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    lines: list[str] = []
    with pytest.raises(RunFailed, match=rf"^{path}: not the bytes that were prepared"):
        arrays.verify(arrays.find(tmp_path, "mnist"), lines.append)
    assert [f"DIFFERENT {path}"] == [line for line in lines if "DIFFERENT" in line]
