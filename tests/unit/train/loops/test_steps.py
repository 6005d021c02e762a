"""The numbers of a step and of an evaluation: on replicas those of one device, and those of plain TensorFlow."""

from typing import Any

import numpy as np
import pytest

from tests.support.measured import measured

CASES = ("plain", "regularised", "weighted")
WHERES = ("one", "mirrored-2", "mirrored-3", "central-2")


def numbers(what: str) -> dict[str, Any]:
    """Return the measurements with 2 and with 3 devices."""
    three, two = measured("replicas", "3")[what], measured("replicas", "2")[what]
    if what == "arithmetic":
        return {case: two[case] | three[case] for case in two}
    return two | three


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_scores_are_those_of_the_whole_batch(case, where):
    """Regularisation counts once whatever the replicas; weights weigh losses, divided by the batch, not scores."""
    expected, actual = numbers("arithmetic")[case]["calculated"], numbers("arithmetic")[case][where]
    assert 3 == len(actual["losses"])
    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-6)
    np.testing.assert_allclose(actual["scores"], expected["scores"], rtol=1e-6)


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("case", CASES)
def test_weights_become_those_of_the_whole_batch(case, where):
    expected, actual = numbers("arithmetic")[case]["calculated"], numbers("arithmetic")[case][where]
    np.testing.assert_allclose(actual["weights"], expected["weights"], rtol=1e-6, atol=1e-6)


def test_the_cases_differ():
    """Else regularisation and the weights of examples would prove nothing above."""
    losses = [numbers("arithmetic")[case]["calculated"]["losses"] for case in CASES]
    assert all(abs(losses[0][0] - other[0]) > 0.1 for other in losses[1:])


@pytest.mark.parametrize("where", WHERES)
def test_what_a_task_wants_comes_back_as_what_any_wants(where):
    """From a call of the inner loop and from asking; each of the three signals alone."""
    one_by_one = [[False, False, False], [False, True, False], [True, False, True], [False, False, True], [True] * 3]
    found = numbers("signals")[where]
    assert one_by_one == found["steps"] == found["asking"]


@pytest.mark.parametrize("where", WHERES)
def test_gathered_numbers_are_whole_and_one_a_replica(where):
    replicas = int(where.partition("-")[2] or 1)
    assert [[-1] * replicas, [2**40] * replicas] == numbers("signals")[where]["gathered"]


@pytest.mark.parametrize("kind", ["gathered", "read"])
@pytest.mark.parametrize("where", ["alone", *WHERES])
def test_evaluation_takes_each_of_1003_examples_once_at_any_replica_count(where, kind):
    """Also the second time, and without the weights that the split has."""
    found = numbers("evaluated")
    results = found[f"{where}, {kind}"]
    assert [found["right"] / 1003] * 2 == [result["eval_accuracy"] for result in results]
    np.testing.assert_allclose([result["eval_loss"] for result in results], found["mean_loss"], rtol=1e-6)
