"""In-memory data: each example once an epoch. That steps train on its global batches: `tests/differential`."""

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import UsageError
from train.data import feeds
from train.data.batches import BatchSlice, Replicas


def epoch(number: int, seed: int, num_examples: int) -> np.ndarray:
    """Return one whole epoch: it is the global batch of step `number` where that is as large as an epoch."""
    return feeds.train_indices(
        tf.constant(number), tf.constant(0), BatchSlice(num_examples, seed), num_examples
    ).numpy()


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


def test_replicas_that_cannot_share_the_global_batch_are_refused():
    with pytest.raises(UsageError, match="^global batch 7: expected a multiple of the 3 replicas"):
        BatchSlice(7, 7, replicas=Replicas(3, 0, 3))
