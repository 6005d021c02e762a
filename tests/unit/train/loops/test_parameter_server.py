"""Slices of steps that a parameter-server cluster does, and does again after a worker has died."""

from typing import Any

import numpy as np

from tests.support.measured import measured


def found(what: str) -> Any:
    """Return the measurements of two workers and a parameter server."""
    return measured("parameter_server")[what]


def test_a_slice_that_is_done_again_must_not_update_again():
    """As the coordinator does with one whose worker it has lost, here with every slice."""
    once, twice = found("once"), found("twice")
    assert (16, 16) == (once["updates"], len(once["losses"]))
    assert once == twice


def test_decay_schedules_and_averages_must_go_on_with_the_same_bits_after_a_restore():
    assert {"same": True, "moved": True} == found("restored")


def test_damaged_data_must_be_reported_by_the_worker_that_reads_it():
    message = found("damaged")
    assert message.startswith("RunFailed: ")
    assert "train_features.bin is damaged in block 0 " in message


def test_a_worker_must_accumulate_micro_batches():
    """One slice after the other, so that the numbers are those of whole batches."""
    once, cut = found("once"), found("cut")
    np.testing.assert_allclose(cut["losses"], once["losses"], rtol=1e-5)
    for of, whole in zip(cut["weights"], once["weights"], strict=True):
        np.testing.assert_allclose(of, whole, rtol=1e-5, atol=1e-6)
    assert once["updates"] == cut["updates"]
