"""Sums over two tasks: one message each way, and the bits of the ring."""

from typing import Any

import pytest
import tensorflow as tf

from tests.support.measured import measured_by_two
from train.model import gradients


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two tasks had in the end: the hashes of the sums, and how often the ring was used."""
    return measured_by_two("exchange", tmp_path_factory.mktemp("exchange"))


@pytest.mark.extended
def test_two_tasks_must_get_the_bits_of_the_ring_without_it(tasks):
    assert 2 == len(tasks)
    for task in tasks:
        sums, rings = task["swap"]
        assert 0 == rings
        assert 4 == len(set(sums))
        assert sums == task["ring"][0] == tasks[0]["swap"][0]


@pytest.mark.extended
@pytest.mark.parametrize("what", ["sparse", "large"])
def test_slices_and_large_tensors_must_be_left_to_the_ring(tasks, what):
    for task in tasks:
        sums, rings = task[what]
        assert 1 == rings
        assert task["ring"][0] == sums[:4]


def test_tensors_that_one_message_cannot_hold_are_known(monkeypatch):
    tensors = [tf.ones([2]), tf.ones([])]
    monkeypatch.setattr(gradients, "LARGEST_SWAP", 3 * 4)
    assert gradients._can_be_one_message(tensors)
    for other in (tf.IndexedSlices(tf.ones([1, 2]), [0], [4, 2]), tf.ones([1]), tf.ones([0], tf.float64)):
        assert not gradients._can_be_one_message([*tensors, other])
