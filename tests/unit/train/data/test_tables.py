"""Presets on a table and on film reviews: the table's form, and the real TFDS builder on reviews that are made up."""

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_datasets.core.download.download_manager import DownloadManager

from cluster.system.errors import PrerequisiteError
from train import presets
from train.data import arrays, sources
from train.data.prepare import packaged
from train.data.prepare.tfds_datasets import VOCABULARY, WORDS, TfdsReviews, numbered
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import models, objectives, optimizers

GOOD, BAD = b"A wonderful, <br />moving film", b"a dull film"
LONG_GOOD, LONG_BAD = 50 * (GOOD + b" "), 50 * (BAD + b" ")


def losses(preset: str, data_dir: Path, batch: int, count: int) -> np.ndarray:
    """Return the losses of some steps of a preset with an own batch size, and without warm-up."""
    config = presets.find(preset)()
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-2, warmup_steps=0)
    )
    source, strategy = sources.find(config, data_dir), tf.distribute.OneDeviceStrategy("/CPU:0")
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        model = models.of(config, source.feature_shape, source.num_outputs)
        policy = optimizers.policy(config, optimizers.build_for(config, model))
    objective = objectives.of(config, classifies=source.classifies, predicts_text=source.is_text)
    feed = sources.train_feed(strategy, source, 0, batch, 7)
    train_step = TrainStep(model, policy, objective, batch, 1)
    return steps.SynchronousSteps(strategy, train_step, feed, count)(0, count, False).losses


def test_a_preset_learns_from_a_table_of_the_same_form(tmp_path):
    random = np.random.default_rng(0)
    rows = random.normal(size=(60, 30)) * np.logspace(-3, 3, 30)
    lines = ["60,30,malignant,benign", *(",".join(map(str, [*row, int(row[0] > 0)])) for row in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    classes, splits = packaged.split_table(tmp_path / "table.csv")
    assert ("malignant", "benign") == classes
    assert [(48, 30), (12, 30)] == [splits[name][0].shape for name in ("train", "test")]
    arrays.write(tmp_path, "breast_cancer", "1.0.0", splits, classes=classes)
    found = losses("breast_cancer", tmp_path, 24, 30)
    assert found[-1] < found[0] / 2


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


def test_a_preset_learns_from_reviews_that_tfds_has_built(tmp_path, monkeypatch):
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
    arrays.write(tmp_path, "imdb_reviews", "1.0.0", splits, classes=classes)
    found = losses("imdb_transformer", tmp_path, 8, 40)
    assert found[-1] < found[0] / 2
