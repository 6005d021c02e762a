"""In-memory data: each example once an epoch. That steps train on its global batches: `tests/differential`."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import UsageError
from train.data import arrays, feeds, sources
from train.data.batches import BatchSlice, Replicas, eval_batches


def epoch(number: int, seed: int, num_examples: int) -> np.ndarray:
    """Return one whole epoch: it is the global batch of step `number` where that is as large as an epoch."""
    return feeds.train_indices(
        tf.constant(number), tf.constant(0), BatchSlice(num_examples, seed), num_examples
    ).numpy()


@pytest.fixture
def split(tmp_path) -> arrays.Split:
    """Ten examples; every pixel of example i is i, its label 100 + i."""
    images = np.repeat(np.arange(10, dtype=np.uint8), 6).reshape(10, 2, 3, 1)
    return write(tmp_path, images, np.arange(100, 110, dtype=np.int64))


@pytest.fixture
def weighted(tmp_path) -> arrays.Split:
    """Ten examples; the two features of example i are i, its three labels 100 + i, its weight 10 + i; all floats."""
    numbers = np.arange(10, dtype=np.float32)
    return write(tmp_path, np.stack([numbers] * 2, 1), np.stack([100 + numbers] * 3, 1), 10 + numbers)


def write(data_dir: Path, *train: np.ndarray) -> arrays.Split:
    return arrays.write_arrays(data_dir, "mnist", "3.0.1", {"train": train, "test": train}).train


def source_of(split: arrays.Split) -> sources.Source:
    return sources.ArraySource.from_arrays(arrays.find_arrays(split.features.path.parents[2], "mnist"))


@pytest.mark.parametrize("num_examples", [1, 2, 3, 10, 257, 65_535, 65_536, 65_538])
def test_every_epoch_is_a_permutation_at_any_size(num_examples):
    for number in range(3):
        one = epoch(number, 7, num_examples)
        np.testing.assert_array_equal(np.arange(num_examples), np.sort(one))


def test_the_order_never_changes():
    assert [22_251, 26_678, 15_416, 5_932, 35_144] == epoch(0, 7, 60_000)[:5].tolist()
    assert [52_375, 58_519, 56_251, 38_255, 34_766] == epoch(1, 7, 60_000)[:5].tolist()


def test_seeds_that_share_their_low_bits_shuffle_differently():
    orders = {epoch(0, seed, 1000).tobytes() for seed in (7, 8, 7 + 2**8, 7 + 2**16, 7 + 2**32)}
    assert 5 == len(orders)


def test_a_replica_batch_larger_than_an_epoch_is_refused():
    with pytest.raises(UsageError, match="11 examples .* 1 to 10"):
        feeds.train_indices(tf.constant(0), tf.constant(0), BatchSlice(11, 7), 10)


def test_a_size_that_tensorflow_cannot_permute_is_refused():
    with pytest.raises(UsageError, match="^65537 examples: .* leave one out"):
        epoch(0, 7, 2**16 + 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 6])
@pytest.mark.parametrize("replica_batch", [1, 4])
def test_evaluation_weighs_each_example_once(split, num_replicas, replica_batch):
    sizes = {"replica_batch": replica_batch, "num_replicas": num_replicas}
    source = source_of(split)
    whole = source.eval_dataset(replica_batch, Replicas(num_replicas, 0, num_replicas))
    parts = [source.eval_dataset(replica_batch, Replicas(num_replicas, at)) for at in range(num_replicas)]
    batches = eval_batches(10, **sizes)
    assert [num_replicas * batches, *[batches] * num_replicas] == [len(dataset) for dataset in (whole, *parts)]
    in_turn = itertools.chain.from_iterable(zip(*parts, strict=True))
    seen: list[int] = []
    for (images_BHWC, labels_B, weights_B), part in zip(whole, in_turn, strict=True):
        np.testing.assert_array_equal(labels_B, part.labels)
        np.testing.assert_array_equal(weights_B, part.weights)
        assert ((replica_batch, 2, 3, 1), tf.float32) == (tuple(images_BHWC.shape), weights_B.dtype)
        np.testing.assert_array_equal(labels_B - 100, tf.cast(images_BHWC[:, 0, 0, 0], tf.int64))
        assert set(weights_B.numpy()) <= {0.0, 1.0}
        seen += labels_B.numpy()[weights_B.numpy() == 1].tolist()
    assert list(range(100, 110)) == seen
    assert (batches - 1) * replica_batch * num_replicas < 10


@pytest.mark.parametrize("part", [Replicas(), Replicas(3, 0, 3), Replicas(3, 1, 2)])
def test_a_dataset_is_the_batches_of_its_replicas_step_by_step(weighted, part):
    examples = feeds.load_examples(weighted)
    batch_slice = BatchSlice(6, 7, first_step=3, num_steps=4, replicas=part)
    dataset = source_of(weighted).train_dataset(batch_slice)
    batches = list(dataset)
    assert len(dataset) == len(batches) == 4 * part.count
    assert all(spec.shape.is_fully_defined() for spec in dataset.element_spec)
    for number, batch in enumerate(batches):
        step, local = divmod(number, part.count)
        replica = part.first + local
        expected = feeds.train_batch(examples, 3 + step, replica, batch_slice)
        for one, other in zip(expected, batch, strict=True):
            np.testing.assert_array_equal(one, other)


def test_replicas_that_cannot_share_the_global_batch_are_refused():
    with pytest.raises(UsageError, match="^global batch 7: expected a multiple of the 3 replicas"):
        BatchSlice(7, 7, replicas=Replicas(3, 0, 3))
