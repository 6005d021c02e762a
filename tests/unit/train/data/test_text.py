"""A text becomes windows whose labels are the bytes that follow, from a package's file, and has a baseline."""

import gzip
import hashlib
import tracemalloc

import numpy as np
import pytest

from cluster.system.errors import PrerequisiteError
from train.data import arrays, ngram
from train.data.prepare import packaged
from train.data.prepare.download import SourceFile
from train.data.prepare.preparation import prepare

TEXT = bytes(range(97, 123)) * 30


@pytest.fixture
def short(monkeypatch):
    """Have the Jargon File be a short text."""
    file = SourceFile("jargon.dict", "", len(TEXT), hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setitem(packaged.FILES, "jargon_file", file)
    monkeypatch.setattr(packaged.split_text, "__defaults__", (64,))
    return file


def test_only_the_trigrams_that_occur_take_memory():
    letters = np.random.default_rng(0).integers(97, 123, 20_000, np.uint8)
    tracemalloc.start()
    try:
        perplexity = ngram.trigram_perplexity(letters[:18_000], letters[18_000:])
        assert tracemalloc.get_traced_memory()[1] < 16e6  # the counts of all that there can be would take 134 MB
    finally:
        tracemalloc.stop()
    assert 25 < perplexity < 40  # of 26 equal ones


def test_labels_are_the_bytes_that_follow_and_splits_do_not_overlap():
    splits = packaged.split_text(TEXT, 50)
    features = np.concatenate([splits[part][0].ravel() for part in ("train", "test")])
    labels = np.concatenate([splits[part][1].ravel() for part in ("train", "test")])
    assert features.tobytes() == TEXT[: len(features)]
    assert labels.astype(np.uint8).tobytes() == TEXT[1 : len(labels) + 1]
    assert (13, 50) == splits["train"][0].shape and (2, 50) == splits["test"][0].shape


@pytest.mark.slow
def test_a_text_of_tfds_becomes_windows(monkeypatch, tmp_path):
    from train.data.prepare.tfds_datasets import TfdsText

    dataset = TfdsText("tiny_shakespeare", "1.0.0", tmp_path)
    (file,) = dataset.source_files()
    assert file.url.startswith("https://")
    assert 64 == len(file.sha256)
    with pytest.raises(PrerequisiteError):
        dataset.decode()
    monkeypatch.setattr(TfdsText, "_built", lambda _self: None)
    parts = {"train": [TEXT * 3, TEXT], "test": [TEXT * 2]}
    monkeypatch.setattr(TfdsText, "_read", lambda _self, _builder, split: {"text": np_texts(parts[split])})
    classes, splits = dataset.decode()
    assert 256 == len(classes)
    assert splits["train"][0].tobytes() == (TEXT * 4)[: splits["train"][0].size]
    assert ((1, 1024), (1, 1024)) == tuple(part.shape for part in splits["test"])


def np_texts(values):
    import tensorflow as tf

    return tf.constant(values)


@pytest.mark.slow
def test_a_text_is_prepared_from_a_package_and_found(short, tmp_path):
    def fetch(dataset, files, folder, say):
        (folder / short.name).write_bytes(TEXT)

    prepare("jargon_file", tmp_path, fetchers={"package": fetch})
    found = arrays.find(tmp_path, "jargon_file")
    assert ((11, 64), "uint8", 256) == (found.train.features.shape, found.train.features.dtype, found.num_outputs)
    assert "int64" == found.train.labels.dtype


def test_a_package_holds_the_text_compressed():
    from train.data.prepare import download

    assert TEXT == download._original("jargon.dict", gzip.compress(TEXT))


def test_the_baseline_knows_what_follows_two_bytes():
    train = np.frombuffer(TEXT, np.uint8)
    assert ngram.trigram_perplexity(train, train[:100]) == pytest.approx(1.11, abs=0.2)


def test_the_baseline_of_noise_is_no_better_than_chance():
    noise = np.random.default_rng(0).integers(0, 16, 20_000).astype(np.uint8)
    assert ngram.trigram_perplexity(noise[:18_000], noise[18_000:]) == pytest.approx(16, rel=0.06)


def test_a_training_cuts_windows_into_its_context():
    features = arrays.ArrayFile(None, (13, 64), "uint8", "", ())
    labels = arrays.ArrayFile(None, (13, 64), "int64", "", ())
    split = arrays.Split(features, labels)
    whole = arrays.ArraySet(None, "jargon_file", "4.4.7", (), 256, split, split, "", {})
    assert whole.is_text
    cut = whole.cut(16)
    assert ((52, 16), (52, 16)) == (cut.train.features.shape, cut.test.labels.shape)
    assert cut.train.features.size_bytes == features.size_bytes
