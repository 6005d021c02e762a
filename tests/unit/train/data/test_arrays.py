"""The prepared arrays: written whole or not at all, found with their sizes checked, verified byte by byte."""

import re
from pathlib import Path

import numpy as np
import pytest

from cluster.system.errors import PrerequisiteError, RunFailed
from cluster.system.json_files import read_json
from train.data.dataset_record import ArrayRecord, Leaf, Split, describe_ready
from train.data.prepare.preparation import write_arrays

IMAGES = np.arange(5 * 4 * 4 * 1, dtype=np.uint8).reshape(5, 4, 4, 1)
LABELS = np.array([3, 1, 4, 1, 5], np.int64)


def write(data_dir: Path, *train: np.ndarray, classes: tuple[str, ...] = tuple("0123456789")) -> ArrayRecord:
    """Write `train`, and the first two of its examples to test on."""
    train = train or (IMAGES, LABELS)
    splits = {"train": train, "test": tuple(array[:2] for array in train)}
    return write_arrays(data_dir, "mnist", "3.0.1", splits, classes=classes, source="a test")


def test_written_arrays_are_found(tmp_path):
    written = write(tmp_path)
    found = ArrayRecord.find(tmp_path, "mnist")
    assert written == found
    # Ten classes are named, of which the labels have six.
    assert ("mnist", "3.0.1", 10) == (found.name, found.version, found.num_outputs)
    assert "a test" == read_json(tmp_path / "arrays" / "mnist-3.0.1" / "arrays.json")["source"]
    assert (5, 2) == (found.train.num_examples, found.test.num_examples)
    assert {"features": Leaf((4, 4, 1), "uint8"), "labels": Leaf((), "int64")} == found.train.example
    features, labels = found.train.files
    assert IMAGES.tobytes() == features.path.read_bytes()
    assert LABELS.astype("<i8").tobytes() == labels.path.read_bytes()
    assert tmp_path / "arrays" / "mnist-3.0.1" / "test_labels.bin" == found.test.files[1].path


def test_only_a_complete_dataset_is_ready(tmp_path):
    assert "" == describe_ready(tmp_path, "mnist", "memory")
    written = write(tmp_path)
    ready = describe_ready(tmp_path, "mnist", "memory")
    assert ready.startswith("mnist 3.0.1: 5 examples to train, 2 to test, each [4, 4, 1]")
    assert "" == describe_ready(tmp_path, "mnist", "stream")
    assert "" == describe_ready(tmp_path, "nowhere:mine", "memory")
    written.test.files[1].path.write_bytes(b"")
    assert "" == describe_ready(tmp_path, "mnist", "memory")


def test_the_wrong_type_is_refused_and_leaves_nothing_under_the_name(tmp_path):
    with pytest.raises(ValueError, match=r"train_features\.bin .*float64"):
        write(tmp_path, IMAGES.astype(np.float64), LABELS)
    with pytest.raises(PrerequisiteError):
        ArrayRecord.find(tmp_path, "mnist")


def test_a_users_dataset_that_is_not_prepared_names_the_command(tmp_path):
    with pytest.raises(PrerequisiteError, match=r"^mine:digits is not prepared: .*; run `invoke data\.prepare --name"):
        ArrayRecord.find(tmp_path, "mine:digits")
    with pytest.raises(PrerequisiteError, match=r"^mine:digits aaa is not prepared in .*; copy .*/mine-digits-aaa"):
        ArrayRecord.find(tmp_path, "mine:digits", "aaa")
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "mine-digits.json").write_text("{")
    with pytest.raises(RunFailed, match=r"mine-digits\.json cannot be read"):
        ArrayRecord.find(tmp_path, "mine:digits")


@pytest.mark.parametrize("size", [0, 79, 81])
def test_a_file_of_the_wrong_size_is_named_with_both_sizes(tmp_path, size):
    path = write(tmp_path).train.files[0].path
    path.write_bytes(bytes(size))
    with pytest.raises(RunFailed, match=f"^{path} has {size} bytes, expected 80 .*invoke data.prepare"):
        ArrayRecord.find(tmp_path, "mnist")


@pytest.mark.parametrize(
    ("part", "damaged"), [(".+", "{"), (".+", "{}"), (".+", "null"), (r'"blocks": "\w+"', '"blocks": ""')]
)
def test_an_index_that_cannot_be_read_is_named(tmp_path, part, damaged):
    write(tmp_path)
    path = tmp_path / "arrays" / "mnist-3.0.1" / "arrays.json"
    path.write_text(re.sub(part, damaged, path.read_text(), flags=re.DOTALL))
    with pytest.raises(RunFailed, match=r"arrays\.json cannot be read .* --fresh`"):
        ArrayRecord.find(tmp_path, "mnist")


def test_a_training_cuts_windows_into_its_context():
    split = Split(13, {"features": Leaf((64,), "uint8"), "labels": Leaf((64,), "int64")})
    whole = ArrayRecord(name="jargon_file", version="4.4.7", classes=(), num_outputs=256, train=split, test=split)
    cut = Split(52, {"features": Leaf((16,), "uint8"), "labels": Leaf((16,), "int64")})
    assert (cut, cut) == (whole.cut(16).train, whole.cut(16).test)
