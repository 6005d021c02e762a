"""Silent corruption is found by a comparison of all copies of the weights, and the right task is named."""

import random

import numpy as np
import pytest
import tensorflow as tf

from cluster.contract import spec
from cluster.system.errors import EXIT_BUG, EXIT_PEER_LOST
from train.loops import replica_check
from train.loops.replica_check import ReplicaCheck, ReplicasDiffer

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8")
GANG = spec.build(workers=2)


def number_of(*values: np.ndarray) -> int:
    return replica_check.digests([tf.Variable(value) for value in values], 1)[0]


def compare(task: str, numbers: list[int], interval: int | str = "auto") -> None:
    """Compare this task's copies with others, whose numbers are those of this task plus these."""
    ReplicaCheck(
        GANG, task, interval, lambda: [tf.Variable([1.0, 2.0])], lambda own: [own + number for number in numbers]
    ).compare(3)


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_changes_the_number(seed):
    dice = random.Random(seed)
    shape = [dice.randrange(1, 8) for _ in range(dice.randrange(4))]
    drawn = [9 * np.asarray(np.random.RandomState(seed).randn(*shape)) for _ in "ab"]
    values = [np.asarray(tf.cast(each, dice.choice(DTYPES)).numpy()) for each in drawn]
    whole, flipped = number_of(*values), values[1].copy()
    octets = flipped.reshape(-1).view(np.uint8)
    octets[dice.randrange(octets.size)] ^= 1 << dice.randrange(8)
    assert whole != number_of(values[0], flipped)
    assert whole == number_of(*values)


def test_variables_that_changed_places_change_the_number():
    first, second = np.float32([1, 2]), np.float32([3, 4])
    assert number_of(first, second) != number_of(second, first)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ([0, 0, 5], {"worker-1"}),
        ([7, 0, 0], {"chief"}),
        ([1, 2, 3], {"chief", "worker-0", "worker-1"}),  # no majority
    ],
)
def test_the_task_without_the_majority_s_bits_is_named(numbers, named):
    for task in GANG.tasks:
        with pytest.raises(ReplicasDiffer) as raised:
            compare(task.name, numbers)
        assert (EXIT_BUG if task.name in named else EXIT_PEER_LOST) == raised.value.exit_code
        assert named == {each.name for each in GANG.tasks if each.name in str(raised.value)}


def test_equal_copies_pass_and_zero_ends_the_checks():
    compare("chief", [0, 0, 0])
    compare("chief", [0, 0, 5], interval=0)
