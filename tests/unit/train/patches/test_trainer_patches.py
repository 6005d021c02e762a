"""Defects of Keras 3 under tf.distribute, and their patches in `train/patches/`.

Each test of a patch fails without it; each test of "Keras itself" fails once the defect is fixed.
"""

from typing import Any

import numpy as np
import pytest

from tests.support.measured import measured


def traps(what: str) -> Any:
    return measured("replicas", "2")["traps"][what]


def held(what: str) -> Any:
    return measured("replicas", "2")["held"][what]


# Parameter servers


def servers(what: str) -> Any:
    return measured("parameter_server")[what]


def test_slot_variables_are_on_the_parameter_servers():
    assert {"/job:ps"} == set(servers("slots"))
    assert 5 == len(servers("slots"))  # iterations, and two for each of the two weights


def test_slot_variables_of_an_optimizer_that_builds_itself_land_on_the_chief():
    assert "/job:chief" in servers("slots_without_build")


def test_two_workers_counting_at_once_lose_no_update():
    assert servers("updates") == servers("counted")


def test_keras_itself_loses_updates():
    assert servers("counted_without_guard") < servers("updates")


# CentralStorageStrategy


def test_replicas_that_share_a_metric_each_count_once():
    """Three steps of two replicas, one of which sees 1 and the other 3."""
    assert {"total": 12, "count": 6, "iterations": 3} == held("counters")


def test_keras_itself_counts_the_others_count_again():
    assert traps("counters")["count"] > 6


# BatchNormalization


@pytest.mark.parametrize("where", ["mirrored-2", "central-2"])
def test_moving_averages_are_those_of_the_whole_batch(where):
    """Of a layer on the surface, of one inside a model, and of one inside a layer."""
    one, replicas = held("normalized")["one"], held("normalized")[where]
    assert (0, 3) == (one["changed"], replicas["changed"])
    assert 6 == len(one["averages"])
    for expected, actual in zip(one["averages"], replicas["averages"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(replicas["losses"], one["losses"], rtol=1e-6)


@pytest.mark.parametrize("where", ["mirrored-2", "central-2"])
def test_replicas_themselves_normalise_over_their_own_examples(where):
    """The variances of parts, whose mean is not that of the whole batch."""
    expected, actual = held("normalized")["one"]["averages"][1], traps("normalized")[where]["averages"][1]
    assert np.abs(np.subtract(expected, actual)).max() > 0.01


@pytest.mark.parametrize("where", ["mirrored-2", "central-2"])
def test_masked_positions_are_left_out_over_the_whole_batch(where: str) -> None:
    """And so are their gradients: where replicas hold different numbers of them."""
    np.testing.assert_allclose(held("by_mask")[where], held("by_mask")["one"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["mirrored-2", "central-2"])
def test_keras_itself_leaves_them_out_by_replica(where: str) -> None:
    assert np.abs(np.subtract(held("by_mask")["one"], traps("by_mask")[where])).max() > 0.01


# Dropout


@pytest.mark.parametrize("where", ["mirrored-2", "central-2"])
def test_replicas_drop_different_units_which_follow_from_seed_step_and_replica(where):
    found = held("dropout")[where]
    kept = np.array(found["kept"])  # [step 0, 1, 0 again; replica; layer 1, layer 2, layer 2 again; units]
    assert (3, 2, 3, 32) == kept.shape
    np.testing.assert_array_equal(kept[0], kept[2])
    masks = {mask.tobytes() for mask in kept[:2].reshape(-1, 32)}
    assert 12 == len(masks)  # two steps, two replicas, three draws: each its own
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_array_equal(held("dropout")["one"]["kept"][0][0], kept[0][0])
    assert found["state"] == found["state_after"]


def test_a_training_step_draws_by_its_place():
    """Two replicas on the same example, at the steps 5, 6 and 5 again."""
    five, six, again = held("step_dropout")
    assert five == again
    assert 4 == len({*five, *six})


def test_keras_itself_drops_the_same_units_on_every_replica():
    kept = np.array(traps("dropout")["mirrored-2"]["kept"])
    np.testing.assert_array_equal(kept[:, 0], kept[:, 1])
    assert (kept[0] != kept[2]).any()  # and other ones when the step is done again


def test_central_storage_itself_refuses_dropout():
    assert "You must specify an aggregation method" in traps("dropout")["central-2"]["error"]
