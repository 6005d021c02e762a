"""Writing shards: from arrays, from any TFDS dataset; whole or not at all, and found with their sizes checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from tests.support import listed_examples, own_module
from tests.support.listed_examples import ListedExamples
from train.data.__main__ import main
from train.data.dataset_record import ArrayRecord, Leaf, ShardRecord
from train.data.prepare import download, sharding

ROOT = Path(__file__).parents[4]
IMAGES = np.arange(11 * 12, dtype=np.uint8).reshape(11, 2, 2, 3)
LABELS = np.arange(11) % 3


def source(*train: Any, classes: tuple[str, ...] = (), version: str = "1.0.0") -> ListedExamples:
    """Return examples to train on, the first three of which are to test on."""
    examples = list(zip(*(train or (IMAGES, LABELS)), strict=True))
    return ListedExamples(examples, examples[:3], version, classes)


def shard(data_dir: Path, given: ListedExamples | None = None, **options: Any) -> ShardRecord:
    return listed_examples.shard(data_dir, "things", given or source(), **options)


def records(path: Path) -> list[tf.train.Example]:
    return [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]


def test_examples_are_dealt_out_in_turn(tmp_path):
    found = shard(tmp_path)
    assert found == ShardRecord.find(tmp_path, "things") == ShardRecord.find(tmp_path, "things", "1.0.0")
    train, test = found.train, found.test
    assert (11, [3, 3, 3, 2]) == (train.num_examples, [file.num_examples for file in train.files])
    assert (3, [1, 1, 1]) == (test.num_examples, [file.num_examples for file in test.files])  # none without an example
    assert {"features": Leaf((2, 2, 3), "uint8"), "labels": Leaf((), "int64")} == train.example
    names = [f"train-{number:05}-of-00004.tfrecord" for number in range(4)]
    names += [f"test-{number:05}-of-00003.tfrecord" for number in range(3)]
    folder = tmp_path / "shards" / "things-1.0.0"
    assert {"shards.json", *names} == {path.name for path in folder.iterdir()}
    third = records(folder / names[2])
    written = [one.features.feature["features"].bytes_list.value[0] for one in third]
    assert [IMAGES[i].tobytes() for i in (2, 6, 10)] == written
    assert [[2], [0], [1]] == [list(one.features.feature["label"].int64_list.value) for one in third]
    assert {".prepare.lock", "shards"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("labels", "classes", "outputs", "shape", "dtype"),
    [
        (LABELS, ("a", "b", "c", "d"), 4, (), "int64"),
        (LABELS.astype(np.uint8), (), 3, (), "int64"),
        (np.ones([11, 4]), (), 4, (4,), "float32"),
        (np.tile(np.arange(5), [11, 1]), (), 5, (5,), "int64"),
    ],
)
def test_labels_are_classes_or_quantities(tmp_path, labels, classes, outputs, shape, dtype):
    found = shard(tmp_path, source(IMAGES, labels, classes=classes))
    assert (classes, outputs) == (found.classes, found.num_outputs)
    assert Leaf(shape, dtype) == found.train.example["labels"] == found.test.example["labels"]


def test_existing_shards_are_not_written_again(tmp_path):
    things = source()
    first = shard(tmp_path, things)
    assert first == shard(tmp_path, things)
    assert 1 == things.opened
    assert 2 == len(shard(tmp_path, things, num_shards=2).train.files)
    shard(tmp_path, things, num_shards=2, fresh=True)
    shard(tmp_path, source(version="2.0.0"), num_shards=2)
    assert 3 == things.opened
    assert "2.0.0" == ShardRecord.find(tmp_path, "things").version
    assert "1.0.0" == ShardRecord.find(tmp_path, "things", "1.0.0").version


def test_a_truncated_or_absent_shard_is_reported_and_written_again(tmp_path):
    file = shard(tmp_path).train.files[1]
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with pytest.raises(RunFailed, match=f"^{file.path} has {file.size_bytes - 1} bytes.*invoke data.shard"):
        ShardRecord.find(tmp_path, "things")
    file.path.unlink()
    with pytest.raises(RunFailed, match=r"train-00001-of-00004\.tfrecord has 0 bytes"):
        ShardRecord.find(tmp_path, "things")
    shard(tmp_path).verify(tmp_path)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (([np.zeros([2, 2], np.uint8), np.zeros([2, 3], np.uint8)], [0, 0]), "train example 1: features"),
        (([b"some", b"text"], [0, 1]), "train example 0: features"),
        ((IMAGES, LABELS - 1), "train example 0: label"),
        ((IMAGES, IMAGES), "train example 0: label"),
    ],
)
def test_unsuitable_examples_are_reported_and_leave_nothing(tmp_path, train, message):
    with pytest.raises(UsageError) as error:
        shard(tmp_path, source(*train))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert [".prepare.lock"] == [path.name for path in tmp_path.iterdir()]


def test_images_are_resized(tmp_path):
    images = [np.full([4 + i, 9, 3], 10 * i, np.uint8) for i in range(11)]
    found = shard(tmp_path, source(images, LABELS), size=5)
    assert (5, 5, 3) == found.train.example["features"].shape
    values = [set(one.features.feature["features"].bytes_list.value[0]) for one in records(found.train.files[0].path)]
    assert [{0}, {40}, {80}] == values
    with pytest.raises(UsageError, match="^--size 5"):
        shard(tmp_path, source(np.ones([11, 4]), LABELS), size=5, fresh=True)


def test_a_full_disk_is_reported_in_one_line(tmp_path, monkeypatch):
    writer = tf.io.TFRecordWriter
    monkeypatch.setattr(tf.io, "TFRecordWriter", lambda path: writer("/dev/full"))
    big = np.zeros([3, 1 << 20], np.uint8)  # larger than what TensorFlow buffers
    with pytest.raises(RunFailed, match=rf"^the disk of {tmp_path} is full \(No space left on device\)"):
        shard(tmp_path, source(big, LABELS[:3]))


def shard_own(data_dir: Path, monkeypatch: pytest.MonkeyPatch, *split: Any) -> ShardRecord:
    """Shard the dataset of a user's module, with the same split to train and to test on."""
    own_module.put(monkeypatch, "own_module", data=lambda: dict.fromkeys(("train", "test"), split))
    return sharding.write_shards("own_module:data", data_dir, num_shards=2)


def test_weights_of_a_users_dataset_are_for_training_only(tmp_path, monkeypatch):
    values = np.arange(6.0)
    found = shard_own(tmp_path / "data", monkeypatch, values, values, values)
    assert ArrayRecord.find(tmp_path / "data", "own_module:data").version == found.version
    number = Leaf((), "float32")
    assert {"features": number, "labels": number, "weights": number} == found.train.example
    assert {"features": number, "labels": number} == found.test.example
    assert 1 == found.num_outputs
    assert tmp_path / "data" / "shards" / f"own_module-data-{found.version}" == found.train.files[0].path.parent
    feature = records(found.train.files[1].path)[2].features.feature
    assert [5.0] == list(feature["weight"].float_list.value) == list(feature["label"].float_list.value)


def test_dictionaries_are_refused(tmp_path, monkeypatch):
    """An example of a shard is one array and one label: the second feature would be taken for the label."""
    with pytest.raises(UsageError, match="--source function"):
        shard_own(tmp_path / "data", monkeypatch, {"a": np.ones((6, 2)), "b": np.ones((6, 3))}, np.arange(6))
    assert not (tmp_path / "data" / "shards").exists()


class TinyThings(tfds.core.GeneratorBasedBuilder):
    """What a dataset of TFDS is made of; tests change these."""

    VERSION = tfds.core.Version("1.2.3")
    pkg_dir_path = ROOT
    image_shape: tuple[int | None, ...] = (2, 2, 3)
    label: Any = tfds.features.ClassLabel(names=["cat", "dog"])
    splits = ("train", "test")
    unlabelled: tuple[str, ...] = ()
    supervised_keys: Any = ("image", "label")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"image": tfds.features.Image(shape=self.image_shape), "label": self.label}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=self.supervised_keys
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in self.splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for i in range(9 if split == "train" else 4):
            shape = [3 + i if size is None else size for size in self.image_shape]
            label = -1 if split in self.unlabelled else i % 2
            yield i, {"image": np.full(shape, i, np.uint8), "label": label}


def tiny(data_dir: Path, **options: Any) -> ShardRecord:
    return sharding.write_shards("tiny_things", data_dir, num_shards=2, **options)


def test_images_of_many_sizes_need_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(TinyThings, "image_shape", (None, None, 1))
    with pytest.raises(UsageError, match="--size"):
        tiny(tmp_path)
    train = tiny(tmp_path, size=7).train
    assert (7, 7, 1) == train.example["features"].shape
    for record in records(train.files[1].path):
        (pixel,) = set(record.features.feature["features"].bytes_list.value[0])
        assert [pixel % 2] == list(record.features.feature["label"].int64_list.value)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("label", tfds.features.Text()),
        ("label", tfds.features.Sequence({"a": np.int64})),
        ("supervised_keys", None),
    ],
)
def test_a_dataset_that_cannot_be_sharded_is_refused(tmp_path, monkeypatch, part, value):
    monkeypatch.setattr(TinyThings, part, value)
    with pytest.raises(UsageError, match=f"^tiny_things .*{part}"):
        tiny(tmp_path)
    assert [] == list(tmp_path.iterdir())  # nothing is downloaded


@pytest.mark.parametrize(
    ("name", "named"),
    [("tiny_thing", "did you mean 'tiny_things'"), ("qqqqqqqqqq", "'qqqqqqqqqq'"), ("tiny_things/large", "/large")],
)
def test_a_name_that_tfds_does_not_know_is_reported(tmp_path, name, named):
    with pytest.raises(UsageError, match=named):
        sharding.write_shards(name, tmp_path)


def test_a_test_split_without_labels_is_left_for_the_validation_split(tmp_path, monkeypatch):
    for name, value in (("label", tfds.features.Scalar(np.int64)), ("splits", ("train", "test", "validation"))):
        monkeypatch.setattr(TinyThings, name, value)
    monkeypatch.setattr(TinyThings, "unlabelled", ("test", "validation"))
    with pytest.raises(UsageError, match="with labels"):
        tiny(tmp_path)
    monkeypatch.setattr(TinyThings, "unlabelled", ("test",))
    assert 4 == tiny(tmp_path / "other").test.num_examples


def test_each_size_is_a_version_which_runs_find_again(tmp_path):
    small, large = tiny(tmp_path), tiny(tmp_path, size=4)
    assert small.version != large.version
    for record, shape in ((small, (2, 2, 3)), (large, (4, 4, 3))):
        found = ShardRecord.find(tmp_path, "tiny_things", record.version)
        assert shape == found.train.example["features"].shape


@pytest.mark.parametrize(
    "failure", [PrerequisiteError("example.org: no such host"), AssertionError("put the files\nthere yourself")]
)
def test_a_download_that_fails_is_reported_in_one_line(tmp_path, monkeypatch, failure):
    monkeypatch.setattr(TinyThings, "url_infos", {"http://example.org/x": None})
    monkeypatch.setattr(download, "probe", Mock(side_effect=failure))
    with pytest.raises(PrerequisiteError, match=f"tiny_things: {' '.join(str(failure).split())}; "):
        tiny(tmp_path)


def test_the_command_shards_and_verifies(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    options = ["--name", "tiny_things", "--data-dir", str(tmp_path)]
    assert 0 == main(["shard", *options, "--shards", "3", "--size", "6"])
    message = (
        "tiny_things 1.2.3-6px: 9 examples to train, 4 to test, each [6, 6, 3] uint8, 2 classes, in 3 and 3 shards"
    )
    assert f"data: {message}" == capsys.readouterr().out.splitlines()[-1]
    assert 0 == main(["verify", *options])
    assert ["ok"] * 6 == [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    for option, value in (("--shards", "1000"), ("--size", "0")):
        assert 2 == main(["shard", *options, option, value])
        assert capsys.readouterr().err.startswith(f"error: {option} {value}: expected a whole number from 1 to ")
