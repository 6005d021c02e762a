"""Sums whose bits do not depend on their order (over replicas: `tests/process/train/test_steps.py`), and shards."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.batches import VirtualShards
from train.elastic.exact_sum import exact_sum

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def summed(*shards: list[float]) -> list[float]:
    return exact_sum([tf.constant(shards, tf.float32)], len(shards))[0].numpy().tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=9), st.randoms())
def test_any_order_must_give_the_same_bits(shards, random):
    shuffled = list(shards)
    random.shuffle(shuffled)
    assert [value.hex() for value in summed(*shards)] == [value.hex() for value in summed(*shuffled)]


@settings(deadline=None, max_examples=60)
@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_a_sum_must_be_the_true_one_to_a_part_in_2_to_the_50(shards):
    [found] = summed(*([number] for number in shards))
    largest = max(abs(number) for number in shards)
    assert abs(found - math.fsum(shards)) <= largest * 2.0**-50


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_must_stay_so(bad):
    """A gradient that overflows must end the run, not become a number."""
    good = tf.constant([[1.0], [2.0]])
    sums = exact_sum([tf.constant([[[1.0, 2.0]], [[bad, 3.0]]]), good], 2)
    assert np.isnan(sums[0]).all()
    assert [3.0] == sums[1].numpy().tolist()


@pytest.mark.parametrize("value", [0.0, -0.0, 3.4028235e38, -3.4028235e38, 1.1754944e-38])
@pytest.mark.parametrize("shards", [1, 2, 7, 8, 64])
def test_the_ends_of_the_range_must_come_through_any_number_of_shards(value, shards):
    number = float(np.float32(value))
    assert [shards * number] == summed(*([number] for _ in range(shards)))


def test_with_8_shards_what_is_2_to_the_36_times_smaller_must_keep_its_digits():
    """The grid of a row is set by its largest number, and this is the smallest that must lose nothing to it."""
    largest, smaller = 1.0, float(np.float32(2.0**-36 * (1 + 2.0**-23)))
    sums = exact_sum([tf.constant([[[largest, smaller]]] * 8)], 8)[0].numpy()
    assert [[8 * largest, 8 * smaller]] == sums.tolist()
    coarser = exact_sum([tf.constant([[[largest, smaller / 2]]] * 8)], 8)[0].numpy()
    assert [[8 * largest, 4 * smaller]] != coarser.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=9), st.integers(0, 2))
def test_a_huge_row_of_an_embedding_must_not_coarsen_the_others(rows, huge_at):
    """Adam divides by what gradients are like, so that a row of tiny ones moves as far as one of huge ones."""
    alone = exact_sum([tf.constant([[row] for row in rows])], len(rows))[0].numpy()
    table = np.repeat(np.array(rows, np.float32)[:, np.newaxis], 3, axis=1)
    table[:, huge_at] = 3e38
    together = exact_sum([tf.constant(table)], len(rows))[0].numpy()
    others = [row for row in range(3) if row != huge_at]
    assert [alone.tobytes()] * 2 == [together[[row]].tobytes() for row in others]


def test_a_huge_number_must_not_coarsen_the_others_of_its_vector_or_another_tensor():
    small = float(np.float32(1.2345678e-20))
    assert [2e20, 2 * small] == pytest.approx(summed([1e20, small], [1e20, small]), rel=1e-7)
    sums = exact_sum([tf.constant([[1e20], [1e20]]), tf.constant([[small], [small]])], 2)
    assert [2 * small] == sums[1].numpy().tolist()


@st.composite
def cuts(draw: st.DrawFn) -> VirtualShards:
    total = draw(st.integers(1, 40))
    return VirtualShards(total, draw(st.integers(1, total)))


@settings(deadline=None, max_examples=60)
@given(cuts())
def test_each_shard_must_be_one_replicas_in_a_graph_too_and_none_may_have_two_more_than_another(cut):
    shares = [list(range(cut.first(replica), cut.first(replica + 1))) for replica in range(cut.replicas)]
    assert list(range(cut.total)) == [shard for share in shares for shard in share]
    assert {cut.most, cut.total // cut.replicas} == {len(share) for share in shares} | {cut.most}
    for replica, share in enumerate(shares):
        assert share == cut.list_shards(tf.constant(replica, tf.int64)).numpy().tolist()
        assert list(range(len(share))) == [int(cut.place(tf.constant(shard, tf.int64))) for shard in share]
