"""Sums whose bits do not depend on their order. Over replicas: `test_elastic.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from train.exact_sum import exact_sum

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def summed(*shards: list[float]) -> list[float]:
    """Return the sum of some shards, on one replica."""
    return exact_sum([tf.constant(shards, tf.float32)], len(shards))[0].numpy().tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=9), st.randoms())
def test_any_order_must_give_the_same_bits(shards: list[list[float]], random: object) -> None:
    shuffled = list(shards)
    random.shuffle(shuffled)
    assert [value.hex() for value in summed(*shards)] == [value.hex() for value in summed(*shuffled)]


@settings(deadline=None, max_examples=60)
@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_a_sum_must_be_the_true_one_to_a_part_in_2_to_the_50(shards: list[float]) -> None:
    [found] = summed(*([number] for number in shards))
    largest = max(abs(number) for number in shards)
    assert abs(found - math.fsum(shards)) <= largest * 2.0**-50


def test_float32_alone_must_not_pass() -> None:
    """What this is for: in another order float32 gives another sum."""
    shards = np.array([1e8, 1.0, -1e8, 0.5], np.float32)
    assert shards.sum() != shards[[0, 2, 1, 3]].sum()
    assert [1.5] == summed(*([float(number)] for number in shards))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_must_stay_so(bad: float) -> None:
    """A gradient that overflows must end the run, not become a number."""
    good = tf.constant([[1.0], [2.0]])
    sums = exact_sum([tf.constant([[1.0, 2.0], [bad, 3.0]]), good], 2)
    assert np.isnan(sums[0]).all()
    assert [3.0] == sums[1].numpy().tolist()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.2e-38, 3e38, -3e38])
def test_the_ends_of_the_range_must_come_through(value: float) -> None:
    number = float(np.float32(value))
    assert [4 * number] == summed([number], [number], [number], [number])


def test_the_small_numbers_of_a_tensor_must_keep_their_digits() -> None:
    """Another tensor's large ones do not coarsen its grid."""
    small = float(np.float32(1.2345678e-20))
    sums = exact_sum([tf.constant([[1e20], [1e20]]), tf.constant([[small], [small]])], 2)
    assert [2 * small] == sums[1].numpy().tolist()
