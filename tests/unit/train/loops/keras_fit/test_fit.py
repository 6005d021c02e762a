"""`--loop fit`: the numbers of one device, and of no disturbance."""

import numpy as np

from tests.support.measured import measured


def test_two_devices_give_the_numbers_of_one():
    """Weights, moving averages and other state of layers, losses, with an optimizer that clips."""
    found = measured("fit")
    for one, two in zip(found["one"]["weights"], found["two"]["weights"], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    losses = [[row["loss"] for row in found[where]["rows"]] for where in ("one", "two")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_training_that_is_killed_inside_of_epochs_ends_with_the_same_bits():
    """With dropout, BatchNormalization and Adam, twice over."""
    whole, killed = measured("fit")["resumed"]["whole"], measured("fit")["resumed"]["killed"]
    assert whole["weights_sha256"] == killed["weights_sha256"]
    assert whole["weights"] == killed["weights"]  # moving averages too
    np.testing.assert_allclose(
        [row["loss"] for row in killed["rows"]], [row["loss"] for row in whole["rows"]], rtol=1e-4
    )
    assert whole["weights_sha256"] != measured("fit")["two"]["weights_sha256"]  # dropout does something


def test_training_accuracy_is_not_weighted():
    """As in the custom loop, and as everywhere in evaluation."""
    found = measured("fit")["weighted"]
    assert found["logged"] == np.float32(found["mean"]) != np.float32(found["weighted"])
