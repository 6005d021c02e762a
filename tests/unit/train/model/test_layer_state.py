"""Layers with state, losses and constraints: several replicas and micro-batches give the numbers of plain Keras."""

from typing import Any

import numpy as np
import pytest

from tests.support.measured import measured

CASES = [
    ("normalized", "one"),
    ("normalized", "mirrored-3"),
    ("normalized", "central-2"),
    ("tracking", "one, micro-batches"),
    ("tracking", "mirrored-3, micro-batches"),
    ("tracking", "central-2, micro-batches"),
    ("tracking", "one, elastic"),
]


def numbers(what: str) -> Any:
    return measured("layer_state", "3")[what]


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_losses_and_variables_must_be_those_of_plain_keras(kind, where):
    """With `add_loss` and BatchNormalization, means, counts of steps and examples, and a constraint."""
    expected, actual = numbers(kind)["keras"], numbers(kind)[where]
    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-6)
    assert [*expected["variables"]] == [*actual["variables"]]
    for name, value in expected["variables"].items():
        np.testing.assert_allclose(actual["variables"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_virtual_shards_must_give_the_same_bits_on_any_replicas():
    assert numbers("tracking")["one, elastic"] == numbers("tracking")["mirrored-3, elastic"]


def test_a_state_that_cannot_be_one_must_be_refused_by_its_name():
    """A whole number that depends on the examples, and what is assigned inside a condition on several replicas."""
    kind, _, message = numbers("disagreeing").partition(": ")
    assert "RunFailed" == kind
    assert "positive" in message
    kind, _, message = numbers("conditional")["mirrored-3"].partition(": ")
    assert "UsageError" == kind
    assert "calls" in message
    assert "" == numbers("conditional")["one"]
