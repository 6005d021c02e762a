"""The data of presets: texts, a table and film reviews; the model of images; the baseline of texts."""

import hashlib
import io
import tarfile
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_datasets.core.download.download_manager import DownloadManager

from cluster.system.errors import PrerequisiteError
from train import presets
from train.data import arrays, ngram
from train.data.prepare import packaged
from train.data.prepare.download import SourceFile
from train.data.prepare.preparation import prepare
from train.data.prepare.tfds_datasets import VOCABULARY, WORDS, TfdsReviews, TfdsText, numbered
from train.model import models

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
    dataset = TfdsText("tiny_shakespeare", "1.0.0", tmp_path)
    (file,) = dataset.source_files()
    assert file.url.startswith("https://")
    assert 64 == len(file.sha256)
    with pytest.raises(PrerequisiteError):
        dataset.decode()
    monkeypatch.setattr(TfdsText, "_built", lambda _self: None)
    parts = {"train": [TEXT * 3, TEXT], "test": [TEXT * 2]}
    monkeypatch.setattr(TfdsText, "_read", lambda _self, _builder, split: {"text": tf.constant(parts[split])})
    classes, splits = dataset.decode()
    assert 256 == len(classes)
    assert splits["train"][0].tobytes() == (TEXT * 4)[: splits["train"][0].size]
    assert ((1, 1024), (1, 1024)) == tuple(part.shape for part in splits["test"])


@pytest.mark.slow
def test_a_text_is_prepared_from_a_package_and_found(short, tmp_path):
    def fetch(dataset, files, folder, say):
        (folder / short.name).write_bytes(TEXT)

    prepare("jargon_file", tmp_path, fetchers={"package": fetch})
    found = arrays.find(tmp_path, "jargon_file")
    assert ((11, 64), "uint8", 256) == (found.train.features.shape, found.train.features.dtype, found.num_outputs)
    assert "int64" == found.train.labels.dtype


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


# Images, tables and reviews


@pytest.mark.slow
def test_the_preset_of_images_has_the_model_of_the_paper():
    model = models.of(presets.find("cifar10_resnet")(), (32, 32, 3), 10)
    assert 272_474 == sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


GOOD, BAD = b"A wonderful, <br />moving film", b"a dull film"
LONG_GOOD, LONG_BAD = 50 * (GOOD + b" "), 50 * (BAD + b" ")


def test_a_table_is_split(tmp_path):
    rows = np.random.default_rng(0).normal(size=(60, 30))
    lines = ["60,30,malignant,benign", *(",".join(map(str, [*row, int(row[0] > 0)])) for row in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    classes, splits = packaged.split_table(tmp_path / "table.csv")
    assert ("malignant", "benign") == classes
    assert [(48, 30), (12, 30)] == [splits[name][0].shape for name in ("train", "test")]


def test_a_table_that_is_damaged_or_missing_is_fetched_again(tmp_path):
    dataset = packaged.PackagedDataset("breast_cancer", "1.0.0", tmp_path)
    with pytest.raises(PrerequisiteError, match="none there"):
        dataset.decode()
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "breast_cancer.csv").write_text("1,1,a,b\n1,0\n")
    dataset.build(tmp_path / "sources", tmp_path)
    with pytest.raises(PrerequisiteError, match="damaged"):
        dataset.decode()


def test_words_have_numbers():
    numbers = numbered(GOOD)
    assert WORDS == len(numbers)
    assert numbers[:4] == numbered(b"a WONDERFUL moving film")[:4]
    assert all(0 < number < VOCABULARY for number in numbers[:4])
    assert not any(numbers[4:])


def test_reviews_are_read_as_tfds_builds_them(tmp_path, monkeypatch):
    """Of an archive of the form of the real one, with made-up reviews, whose sha256 TFDS does not know."""
    monkeypatch.setattr(DownloadManager, "_register_or_validate_checksums", lambda *_, **__: None)
    source_files = TfdsReviews("imdb_reviews", "1.0.0", tmp_path).source_files()
    archive = tmp_path / "sources" / source_files[0].name
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for split, count in (("train", 16), ("test", 4)):
            for number in range(count):
                kind, text = ("pos", LONG_GOOD) if number % 2 else ("neg", LONG_BAD)
                member = tarfile.TarInfo(f"aclImdb/{split}/{kind}/{number}_1.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
        unlabelled = tarfile.TarInfo("aclImdb/train/unsup/0_0.txt")
        unlabelled.size = len(GOOD)
        tar.addfile(unlabelled, io.BytesIO(GOOD))
    dataset = TfdsReviews("imdb_reviews", "1.0.0", tmp_path)
    with pytest.raises(PrerequisiteError, match="none there"):
        dataset.decode()
    dataset.build(archive.parent, tmp_path / "build")
    assert dataset.files()
    classes, splits = dataset.decode()
    assert ("neg", "pos") == classes
    assert [(16, WORDS), (4, WORDS)] == [splits[name][0].shape for name in ("train", "test")]
    labels_of = {tuple(words): label for words, label in zip(*splits["train"], strict=True)}
    assert {tuple(numbered(LONG_BAD)): 0, tuple(numbered(LONG_GOOD)): 1} == labels_of
