"""The data of a run: what every replica is fed, and that a run stays with the data that it began with."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import PrerequisiteError, RunFailed, UsageError
from tests.support import listed_examples, own_module
from tests.support.listed_examples import TEST, TRAIN, ListedExamples, numbers, ranges, steps
from train.config import TrainConfig
from train.data import feeds, store
from train.data.batches import BatchSlice, Replicas
from train.data.function import reading
from train.data.function.examine import examine_function
from train.data.opening import open_source
from train.data.prepare.preparation import write_arrays
from train.data.sources import Source

ARRAYS = TrainConfig(dataset="own:numbers")
SHARDS = TrainConfig(dataset="numbers", source="stream")
FUNCTION = TrainConfig(dataset="own_function:data", source="function", num_outputs=3)


@pytest.fixture(params=["arrays", "shards", numbers, ranges])
def source(request, tmp_path, monkeypatch) -> Source:
    """The same examples as arrays and as shards, both with weights, and of functions of both forms."""
    train = [(np.full(2, i, np.float32), i % 3, np.float32(10 * i)) for i in range(TRAIN)]
    test = [example[:2] for example in train[:TEST]]
    if request.param == "arrays":
        columns = [tuple(np.stack(part) for part in zip(*examples, strict=True)) for examples in (train, test)]
        write_arrays(tmp_path, "own:numbers", "1", {"train": columns[0], "test": columns[1]})
        return open_source(ARRAYS, tmp_path)
    if request.param == "shards":
        listed_examples.shard(tmp_path, "numbers", ListedExamples(train, test), num_shards=6)
        return open_source(SHARDS, tmp_path)
    own_module.put(monkeypatch, "own_function", data=request.param)
    monkeypatch.setattr(reading, "_OPEN", {})
    examine_function("own_function:data", tmp_path, "3")
    return open_source(FUNCTION, tmp_path)


def test_each_task_reads_its_own_part(source):
    whole = steps(source, 0, 9, 3)
    assert whole[0::3] == steps(source, 0, 9, 3, range(1))
    assert [each for at, each in enumerate(whole) if at % 3] == steps(source, 0, 9, 3, range(1, 3))


@pytest.mark.parametrize("source", ["arrays", "shards", numbers], indirect=True)
def test_each_example_is_read_once_an_epoch_at_any_number_of_replicas(source):
    one, two = steps(source, 0, 10), steps(source, 0, 10, 2)
    assert one == [a + b for a, b in zip(two[::2], two[1::2], strict=True)]
    flat = [*itertools.chain(*one)]
    assert [sorted(flat[at : at + TRAIN]) for at in (0, TRAIN, 2 * TRAIN)] == [list(range(TRAIN))] * 3


def test_an_iterator_starts_at_the_step_from_which_training_resumes(source):
    config, streamed = TrainConfig(global_batch=6, seed=7), dataclasses.replace(source, in_memory=False)
    whole = steps(source, 0, 8)
    for first in (1, 3, 4):  # an epoch is 20 / 6 steps long
        feed = feeds.train_feed(tf.distribute.get_strategy(), streamed, config, first)
        assert whole[first:] == [feed.next().features[:, 0].numpy().astype(int).tolist() for _ in range(8 - first)]


def test_shapes_are_static_the_length_is_known_and_the_parts_of_an_example_stay_together(source):
    dataset = source.train_dataset(BatchSlice(6, 7, first_step=5, replicas=Replicas(3, 1, 2)))
    assert [[2, 2], [2], [2]] == [spec.shape.as_list() for spec in dataset.element_spec]
    assert [tf.float32, tf.int64, tf.float32] == [spec.dtype for spec in dataset.element_spec]
    assert tf.data.INFINITE_CARDINALITY == dataset.cardinality()
    assert 200 == sum(1 for _ in dataset.take(200))
    for features, labels, weights in dataset.take(8):
        np.testing.assert_array_equal(features[:, 0] % 3, tf.cast(labels, tf.float32))
        np.testing.assert_array_equal(10 * features[:, 1] if source.weighted else tf.ones([2]), weights)


@pytest.mark.parametrize(("replicas", "replica_batch"), [(1, 6), (1, 50), (4, 4), (3, 1)])
def test_evaluation_takes_every_example_once(source, replicas, replica_batch):
    def passes(part: Replicas) -> list[list[int]]:
        """Return the examples of weight 1 in each batch of one replica or of all, the same in both of two passes."""
        dataset = source.eval_dataset(replica_batch, part)
        shapes = [spec.shape.as_list() for spec in dataset.element_spec]
        assert [[replica_batch, 2], [replica_batch], [replica_batch]] == shapes
        assert part.count * -(-TEST // (replicas * replica_batch)) == len(dataset)
        batches = [[*dataset] for _ in range(2)]
        assert all(set(batch.weights.numpy()) <= {0.0, 1.0} for batch in batches[0])
        first, second = ([b.features[:, 0].numpy()[b.weights.numpy() == 1].tolist() for b in all_] for all_ in batches)
        assert first == second
        return first

    parts = [passes(Replicas(replicas, replica)) for replica in range(replicas)]
    whole = passes(Replicas(replicas, 0, replicas))
    assert whole == [*itertools.chain(*zip(*parts, strict=True))]
    assert list(range(TEST)) == sorted(itertools.chain(*whole))


def prepare(data_dir: Path, version: str, value: float) -> None:
    features = np.full((10, 3), value, np.float32)
    parts = (features, np.arange(10, dtype=np.float32))
    write_arrays(data_dir, "own:numbers", version, {"train": parts, "test": tuple(part[:4] for part in parts)})


def shard(data_dir: Path, version: str, value: float, num_shards: int = 3) -> None:
    examples = [(np.full(2, value, np.float32), i) for i in range(12)]
    listed_examples.shard(data_dir, "numbers", ListedExamples(examples, examples[:5], version), num_shards)


def first_feature(source: Source) -> float:
    return float(next(iter(source.train_dataset(BatchSlice(2, 7)))).features[0, 0])


def test_another_number_of_shards_is_refused_in_one_line(run, tmp_path):
    shard(tmp_path, "1", 1.0)
    open_source(SHARDS, tmp_path, run)
    shard(tmp_path, "1", 1.0, num_shards=4)
    with pytest.raises(RunFailed, match="invoke data.shard --name numbers --shards 3"):
        open_source(SHARDS, tmp_path, run)
    shard(tmp_path, "1", 1.0, num_shards=3)
    assert 3 == open_source(SHARDS, tmp_path, run).num_shards


@pytest.mark.parametrize(
    ("config", "write", "kind"), [(ARRAYS, prepare, "arrays"), (SHARDS, shard, "shards")], ids=["arrays", "shards"]
)
def test_a_later_generation_asks_for_the_data_of_the_first(run, tmp_path, config, write, kind):
    with pytest.raises(PrerequisiteError):
        open_source(config, tmp_path, run)
    assert not (run.control / "data.json").exists()
    write(tmp_path, "1", 1.0)
    open_source(config, tmp_path, run)
    write(tmp_path, "2", 2.0)
    assert 1.0 == first_feature(open_source(config, tmp_path, run))
    assert 2.0 == first_feature(open_source(config, tmp_path))
    store.path_of(tmp_path, kind, config.dataset, "1").rename(tmp_path / "elsewhere")
    with pytest.raises(PrerequisiteError, match=f"^{config.dataset} 1 is not "):
        open_source(config, tmp_path, run)


def epoch(number: int, seed: int, num_examples: int) -> np.ndarray:
    """Return one whole epoch: it is the global batch of step `number` where that is as large as an epoch."""
    return feeds.train_indices(
        tf.constant(number), tf.constant(0), BatchSlice(num_examples, seed), num_examples
    ).numpy()


@pytest.mark.parametrize("num_examples", [1, 2, 3, 10, 257, 65_535, 65_536, 65_538])
def test_every_epoch_is_a_permutation_at_any_size(num_examples):
    for number in range(3):
        np.testing.assert_array_equal(np.arange(num_examples), np.sort(epoch(number, 7, num_examples)))


def test_the_order_of_arrays_never_changes():
    assert [22_251, 26_678, 15_416, 5_932, 35_144] == epoch(0, 7, 60_000)[:5].tolist()
    assert [52_375, 58_519, 56_251, 38_255, 34_766] == epoch(1, 7, 60_000)[:5].tolist()


def test_seeds_that_share_their_low_bits_shuffle_differently():
    assert 5 == len({epoch(0, seed, 1000).tobytes() for seed in (7, 8, 7 + 2**8, 7 + 2**16, 7 + 2**32)})


def test_a_size_that_tensorflow_cannot_permute_is_refused():
    with pytest.raises(UsageError, match="^65537 examples: .* leave one out"):
        epoch(0, 7, 2**16 + 1)


def test_replicas_that_cannot_share_the_global_batch_are_refused():
    with pytest.raises(UsageError, match="^global batch 7: expected a multiple of the 3 replicas"):
        BatchSlice(7, 7, replicas=Replicas(3, 0, 3))
