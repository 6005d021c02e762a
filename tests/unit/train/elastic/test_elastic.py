"""Training on virtual shards: the same bits on any number of replicas, and the right ones."""

import math
from typing import Any

import numpy as np
import pytest

from tests.support.measured import measured

OTHERS = ("central-2", "mirrored-3")


def numbers(what: str, *more: str) -> dict[str, Any]:
    return measured("elastic", "3", *more)[what]


@pytest.mark.parametrize(("kind", "where"), [("whole", "central-2"), ("whole", "mirrored-3"), ("read", "mirrored-3")])
def test_any_number_of_replicas_must_give_the_same_bits(kind, where):
    """Weights, slots, moving averages, losses, scores: from arrays and from an iterator, shared evenly or not."""
    assert numbers("whole")["one"] == numbers(kind)[where]


@pytest.mark.long
@pytest.mark.parametrize("where", OTHERS)
@pytest.mark.parametrize("kind", ["plain", "whole", "read"])
def test_any_number_of_replicas_must_give_the_same_bits_of_everything(kind, where):
    assert numbers(kind, "all")["one"] == numbers(kind, "all")[where]


def test_the_numbers_must_be_those_of_a_plain_training():
    """Within rounding: virtual shards change the order of sums and nothing else."""
    plain, elastic = numbers("plain")["without"], numbers("plain")["one"]
    np.testing.assert_allclose(elastic["losses"], plain["losses"], rtol=1e-6)
    np.testing.assert_allclose(elastic["scores"], plain["scores"], rtol=1e-6)
    for one, other in zip(elastic["weights"], plain["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_moving_averages_must_move_and_what_is_fixed_must_stay():
    one = numbers("whole")["one"]
    mean, variance = one["averages"]
    assert all(value != 0 for value in mean)
    assert all(0 < value != 1 for value in variance)
    assert [np.array([1e30, 1.1], np.float32).tolist()] == one["fixed"]


@pytest.mark.parametrize("where", ["one", *OTHERS])
def test_sums_must_be_exact_and_the_same_wherever_the_shards_lie(where):
    """To within the grid: 2**-36 of the largest number, which 24 orders of magnitude put to the test."""
    shards = np.array(numbers("sums")["numbers"])
    found = [float.fromhex(text) for text in numbers("sums")[where]]
    grid = 2.0**-58 * 2 ** math.ceil(math.log2(np.abs(shards).max()))
    np.testing.assert_allclose(found, [math.fsum(column) for column in shards.T], rtol=0, atol=len(shards) * grid)
    assert numbers("sums")["one"] == numbers("sums")[where]
