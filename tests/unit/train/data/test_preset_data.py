"""The data of the language model: the Jargon File."""

import hashlib

import numpy as np
import pytest

from train.data import arrays
from train.data.prepare import jargon_file
from train.data.prepare.download import SourceFile
from train.data.prepare.preparation import prepare_dataset

TEXT = bytes(range(97, 123)) * 30


def test_labels_are_the_bytes_that_follow_and_splits_do_not_overlap():
    splits = jargon_file.split_text(TEXT, 50)
    features = np.concatenate([splits[part][0].ravel() for part in ("train", "test")])
    labels = np.concatenate([splits[part][1].ravel() for part in ("train", "test")])
    assert features.tobytes() == TEXT[: len(features)]
    assert labels.astype(np.uint8).tobytes() == TEXT[1 : len(labels) + 1]
    assert (13, 50) == splits["train"][0].shape and (2, 50) == splits["test"][0].shape


@pytest.mark.slow
def test_a_text_is_prepared_from_a_package_and_found(monkeypatch, tmp_path):
    file = SourceFile("jargon.dict", "", len(TEXT), hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(jargon_file, "FILE", file)
    monkeypatch.setattr(jargon_file.split_text, "__defaults__", (64,))

    def fetch(dataset, files, folder, say):
        (folder / file.name).write_bytes(TEXT)

    prepare_dataset("jargon_file", tmp_path, fetchers={"package": fetch})
    found = arrays.find_arrays(tmp_path, "jargon_file")
    assert ((11, 64), "uint8", 256) == (found.train.features.shape, found.train.features.dtype, found.num_outputs)
    assert "int64" == found.train.labels.dtype


def test_a_training_cuts_windows_into_its_context():
    features = arrays.ArrayFile(None, (13, 64), "uint8", "", ())
    labels = arrays.ArrayFile(None, (13, 64), "int64", "", ())
    split = arrays.Split(features, labels)
    whole = arrays.ArraySet(None, "jargon_file", "4.4.7", (), 256, split, split, "", {})
    assert whole.is_text
    cut = whole.cut(16)
    assert ((52, 16), (52, 16)) == (cut.train.features.shape, cut.test.labels.shape)
    assert cut.train.features.size_bytes == features.size_bytes
