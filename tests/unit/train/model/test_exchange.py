"""Sums over two tasks: one message each way, and the bits of the ring."""

from typing import Any

import pytest

from tests.support.measured import measured


@pytest.fixture(scope="module")
def tasks() -> Any:
    """What each of two tasks had in the end: the hashes of the sums, and how often the ring was used."""
    return measured("exchange")


@pytest.mark.extended
def test_two_tasks_must_get_the_bits_of_the_ring_without_it(tasks):
    assert 2 == len(tasks)
    for task in tasks:
        sums, rings = task["swap"]
        assert 0 == rings
        assert 4 == len(set(sums))
        assert sums == task["ring"][0] == tasks[0]["swap"][0]


@pytest.mark.parametrize("what", ["sparse", "large"])
def test_slices_and_large_tensors_must_be_left_to_the_ring(tasks, what):
    for task in tasks:
        sums, rings = task[what]
        assert 1 == rings
        assert task["ring"][0] == sums[:4]
