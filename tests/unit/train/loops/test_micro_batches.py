"""Gradient accumulation: what micro-batches change, and what they must not."""

from typing import Any

import numpy as np
import pytest

from cluster.contract.compatibility import check_micro_batches
from cluster.system.errors import UsageError
from tests.support.measured import measured


def numbers(what: str) -> Any:
    return measured("micro_batches", "3")[what]


@pytest.mark.parametrize("micro_batches", ["4", "12"])
def test_micro_batches_must_give_the_numbers_of_the_whole_batch(micro_batches):
    """Weights, losses and scores within rounding, with weighted examples, regularisation and clipping."""
    whole, cut = numbers("one")["1"], numbers("one")[micro_batches]
    for what in ("losses", "scores", "weights"):
        np.testing.assert_allclose(cut[what], whole[what], rtol=1e-5, atol=1e-6)
    assert whole["weights_sha256"] != cut["weights_sha256"]  # else nothing was cut


def test_replicas_must_give_the_numbers_of_one():
    for micro_batches in ("1", "2"):
        cut = numbers("mirrored-3")[micro_batches]
        np.testing.assert_allclose(cut["weights"], numbers("one")["1"]["weights"], rtol=1e-5, atol=1e-6)


def test_the_same_training_must_give_the_same_bits_also_from_an_iterator():
    assert numbers("one")["4"] == numbers("read")
    assert numbers("mirrored-3")["2"] == numbers("mirrored-3, read")


def test_the_order_of_the_sum_must_be_the_documented_one():
    """Bit for bit: from zeros, micro-batch after micro-batch. Pipelines are compared with it."""
    assert numbers("calculated") == numbers("accumulated")


def test_float16_must_be_scaled_checked_and_clipped_once_a_step():
    np.testing.assert_allclose(numbers("fp16")["weights"], numbers("one")["1"]["weights"], atol=1e-2)
    assert 0 == numbers("fp16")["skipped"]


def test_virtual_shards_must_give_the_same_bits_on_any_replicas():
    """With BatchNormalization and dropout; without them, the numbers of a plain training, too."""
    assert numbers("elastic")["one"] == numbers("elastic")["mirrored-3"]
    np.testing.assert_allclose(numbers("elastic, 3")["weights"], numbers("one")["1"]["weights"], rtol=1e-4, atol=1e-6)


def test_batch_normalization_must_follow_every_micro_batch():
    mean, variance = numbers("whole")["averages"]
    assert all(value != 0 for value in mean)
    assert all(0 < value != 1 for value in variance)


def test_dropout_must_draw_anew_for_every_micro_batch_and_replica():
    first, second, whole = numbers("dropped")
    assert first == whole
    assert 6 == len({*first, *second})


def test_memory_must_fall_with_the_number_of_micro_batches():
    largest = numbers("largest")
    assert largest["4"] * 4 == largest["1"]


def test_fit_must_accumulate_as_the_custom_loop_does():
    """On one device and on two."""
    found = measured("fit")["micro_batches"]
    for where in ("one", "two"):
        for cut, whole in zip(found[where]["weights"], found["whole"]["weights"], strict=True):
            np.testing.assert_allclose(cut, whole, rtol=1e-4, atol=1e-5)
        losses = [[row["loss"] for row in found[which]["rows"]] for which in (where, "whole")]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
        scores = [[row["accuracy"] for row in found[which]["rows"]] for which in (where, "whole")]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)
    assert "UsageError" == found["refused"]  # BatchNormalization on two


@pytest.mark.parametrize(("batch", "replicas", "micro_batches"), [(192, 3, 5), (192, 3, 65), (12, 12, 2), (10, 3, 1)])
def test_a_batch_that_cannot_be_cut_evenly_must_be_refused(batch, replicas, micro_batches):
    with pytest.raises(UsageError):
        check_micro_batches(batch, replicas, micro_batches)


@pytest.mark.parametrize(("batch", "replicas", "micro_batches"), [(192, 3, 1), (192, 3, 64), (12, 12, 1)])
def test_a_batch_that_can_be_cut_evenly_must_be_taken(batch, replicas, micro_batches):
    check_micro_batches(batch, replicas, micro_batches)
