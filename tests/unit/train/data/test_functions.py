"""A dataset as a function of (split, shard): examined before a run, read by each task, a pure function of the step."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract import kept_results
from cluster.system.errors import RunFailed, UsageError
from tests.support import own_module
from tests.support.listed_examples import TEST, TRAIN, Numbers, numbers, ranges, steps
from train.config import TrainConfig
from train.data import opening
from train.data.batches import BatchSlice
from train.data.function import reading
from train.data.function.examine import examine_function
from train.data.function.reading import FunctionRecord, Shard
from train.data.sources import Source

NAME = "own_function:data"
CONFIG = TrainConfig(source="function", dataset=NAME, num_outputs=3)


@pytest.fixture
def function(monkeypatch) -> Callable[[Any], str]:
    module = own_module.put(monkeypatch, "own_function")
    monkeypatch.setattr(reading, "_OPEN", {})

    def put(data: Any) -> str:
        module.data = data
        return NAME

    return put


@pytest.fixture
def source(function, tmp_path) -> Callable[[Any], Source]:
    def make(data: Any) -> Source:
        examine_function(function(data), tmp_path / "data", "3")
        return opening.open_source(CONFIG, tmp_path / "data")

    return make


def without_seed(split: str, shard: Shard) -> tf.data.Dataset:
    return tf.data.Dataset.range(TRAIN).shuffle(TRAIN).map(lambda i: (tf.fill([2], tf.cast(i, tf.float32)), i % 3))


@pytest.mark.parametrize("data", [ranges, without_seed])
def test_a_dataset_is_in_another_order_in_every_epoch(source, data):
    found = source(data)
    flat = [*itertools.chain(*steps(found, 0, 9))]
    assert flat == [*itertools.chain(*steps(found, 0, 5)), *itertools.chain(*steps(found, 5, 4))]
    # Epochs of 4, 3 and 3 steps: the first begins again, so has 4 examples twice.
    assert set(range(TRAIN)) == set(flat[:24]) and flat[:18] != flat[24:42]


def test_a_short_shard_begins_again(source):
    def uneven(split: str, shard: Shard) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(TRAIN)
        if shard.count == 2:  # 18 and 2
            dataset = dataset.take(18) if shard.index == 0 else dataset.skip(18)
        return dataset.map(lambda i: (tf.fill([2], tf.cast(i, tf.float32)), i % 3))

    found = steps(source(uneven), 0, 5, 2)
    assert 10 == len(found)
    assert [[18, 19, 18]] == found[1:2]


def test_dictionaries_weights_and_types(source):
    def data(split: str, _shard: Shard) -> Any:
        count = TRAIN if split == "train" else TEST

        class Dictionaries(Numbers):
            def __getitem__(self, index: int) -> Any:
                features = {"image": np.full([2, 2], index, np.uint8), "age": np.float64(index)}
                return features, np.int16(index % 3), 2

        return Dictionaries(count)

    found = source(data)
    assert {"image": (2, 2), "age": ()} == found.feature_shape
    assert found.weighted and found.classifies
    (batch,) = found.train_dataset(BatchSlice(4, 7)).take(1)
    assert (tf.uint8, [4, 2, 2]) == (batch.features["image"].dtype, batch.features["image"].shape)
    assert (tf.float32, tf.int64) == (batch.features["age"].dtype, batch.labels.dtype)
    np.testing.assert_array_equal(batch.features["image"][:, 0, 0], batch.features["age"])
    np.testing.assert_array_equal([2.0] * 4, batch.weights)


def test_a_whole_batch_is_read_at_once_where_the_source_can(source):
    class Batches(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(np.full(2, -index, np.float64), 0) for index in indices]

    found = source(lambda split, shard: Batches(TRAIN))
    assert all(value <= 0 for step in steps(found, 0, 3) for value in step)


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError("disk gone")
        return np.zeros(3 if index == 5 else 2), 0


def first_alone(split: str, shard: Shard) -> tf.data.Dataset:
    return tf.data.Dataset.range(0 if shard.index else TRAIN).map(lambda i: (tf.zeros(2), i % 3))


@pytest.mark.parametrize(("data", "named"), [(lambda split, shard: Broken(TRAIN), NAME), (first_alone, "shard")])
def test_an_example_that_fails_or_differs_and_an_empty_shard_are_reported(source, data, named):
    with pytest.raises(tf.errors.OpError) as error:
        steps(source(data), 0, 4, 2)
    explained = opening.explain(error.value)
    assert isinstance(explained, RunFailed) and named in str(explained)


def test_a_dataset_that_calls_python_cannot_be_sent_elsewhere():
    error = tf.errors.InvalidArgumentError(None, None, "ValueError: Could not find callback with key=pyfunc_3 in the")
    assert isinstance(opening.explain(error), RunFailed)
    assert opening.explain(tf.errors.InvalidArgumentError(None, None, "something else")) is None
    error = tf.errors.InvalidArgumentError(None, None, "expected to contain 9 elements but contained only 4 elements")
    assert "its assert_cardinality" in str(opening.explain(error))


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, _batch: int) -> Any:
        return np.zeros([4, 2]), np.zeros(4, int)


class Sized:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "data",
    [
        lambda split: numbers(split, None),  # type: ignore[arg-type]
        lambda split, shard: Sized(),
        lambda split, shard: (np.zeros([3, 2]), np.zeros(3)),
        lambda split, shard: 1 / 0,
        lambda split, shard: Numbers(0),
        lambda split, shard: Batches(),
        lambda split, shard: tf.data.Dataset.range(5).map(lambda i: ({0: i}, i)),
        lambda split, shard: Numbers(-1),
        lambda split, shard: numbers(split, shard) if split == "train" else ranges(split, shard),
        lambda split, shard: tf.data.Dataset.range(5),
        lambda split, shard: tf.data.Dataset.range(0).map(lambda i: (i, i)),
        lambda split, shard: tf.data.Dataset.range(5).repeat().map(lambda i: (i, i)),
        lambda split, shard: tf.data.Dataset.range(5).map(lambda i: (tf.as_string(i), i)),
        lambda split, shard: tf.data.Dataset.range(5).map(lambda i: (tf.zeros(i), i)),
        lambda split, shard: tf.data.Dataset.range(5).map(lambda i: (i, i)).shuffle(5, seed=int(shard.seed)),
        lambda split, shard: tf.data.Dataset.range(5).map(lambda i: (tf.zeros(2 if split == "train" else 3), i)),
    ],
)
def test_unsuitable_functions_are_refused(function, tmp_path, data):
    with pytest.raises(UsageError):
        examine_function(function(data), tmp_path / "data", "3")


def test_a_dataset_of_batches_is_refused_as_such(function, tmp_path):
    with pytest.raises(UsageError, match=r"leave batch\(\) out"):
        examine_function(function(lambda split, shard: ranges(split, shard).batch(2)), tmp_path / "data", "3")


def test_whole_number_labels_need_their_classes(function, tmp_path):
    def data(split: str, shard: Shard) -> tf.data.Dataset:
        return tf.data.Dataset.range(5).map(lambda i: (i, {"digit": i, "size": tf.zeros(2)}))

    name = function(data)
    with pytest.raises(UsageError):
        examine_function(name, tmp_path / "data", "")
    assert {"digit": 10, "size": 2} == examine_function(name, tmp_path / "data", "digit=10").num_outputs


def test_examples_are_counted_where_the_dataset_does_not_know_and_again_once_the_code_changes(
    function, tmp_path, monkeypatch
):
    module = tmp_path / "own_function.py"
    module.touch()
    monkeypatch.setattr(kept_results, "opened", lambda: [str(module)])
    sizes = {"train": 10, "test": 4}

    def data(split: str, shard: Shard) -> tf.data.Dataset:
        return tf.data.Dataset.range(sizes[split] * 2).filter(lambda i: i % 2 == 0).map(lambda i: (i, float(0)))

    name, folder = function(data), tmp_path / "data"
    found = examine_function(name, folder)
    assert (10, 4, True) == (found.train.num_examples, found.test.num_examples, found.counted)
    sizes["train"] = 12
    assert found == examine_function(name, folder) == FunctionRecord.find(folder, name)
    assert 12 == examine_function(name, folder, fresh=True).train.num_examples
    sizes["train"] = 14
    module.write_text("# changed")
    assert 14 == examine_function(name, folder).train.num_examples


def test_a_task_that_sees_other_data_is_refused(function, source, tmp_path):
    found = source(ranges)
    function(lambda split, shard: tf.data.Dataset.range(TRAIN).map(lambda i: (tf.zeros(3), i)))
    with pytest.raises(UsageError):
        steps(found, 0, 1)
    examine_function(function(numbers), tmp_path / "data", "3")
    function(lambda split, shard: Numbers(TRAIN - 1))
    with pytest.raises(UsageError):
        opening.open_source(CONFIG, tmp_path / "data")


GENERATOR, DROPOUT = tf.random.Generator.from_seed(1), keras.layers.Dropout(0.5)


def augmented(change: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[str, Shard], tf.data.Dataset]:
    return lambda split, shard: ranges(split, shard).shuffle(4, seed=shard.seed).map(lambda x, y: (change(x), y))


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        (augmented(lambda x: x + tf.random.uniform([], dtype=x.dtype)), "RandomUniform"),
        (augmented(lambda x: x + GENERATOR.uniform([], dtype=x.dtype)), "RngReadAndSkip"),
        (augmented(lambda x: x + tf.cast(DROPOUT(tf.ones([]), training=True), x.dtype)), "assigns a variable"),
        (augmented(lambda x: x * tf.random.stateless_uniform([], (1, 2), dtype=x.dtype)), ""),
    ],
)
def test_random_numbers_that_do_not_follow_from_the_seed_are_reported(function, tmp_path, capsys, data, warning):
    examine_function(function(data), tmp_path, "3")
    reported = capsys.readouterr().err
    assert warning in reported
    assert ("warning" in reported) == bool(warning)
