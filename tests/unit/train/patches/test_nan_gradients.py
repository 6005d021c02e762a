"""A gradient that is not finite shows in the loss, whatever the kernels make of it later."""

import math
from typing import Any

import pytest
import tensorflow as tf

from train.patches import nan_gradients

GOOD = tf.constant([1.0, -3e38])


def checked(*gradients: Any) -> float:
    return float(nan_gradients.nan_if_broken(tf.constant(0.25), gradients))


def test_the_loss_stays_where_every_gradient_is_finite():
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 4]))
    assert 0.25 == checked(GOOD, None, sparse, tf.ones([2], tf.bfloat16))
    assert 0.25 == checked(None)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_the_loss_is_nan_where_one_is_not(broken):
    assert math.isnan(checked(GOOD, tf.constant([[0.0], [broken]])))
    assert math.isnan(checked(GOOD, tf.IndexedSlices(tf.constant([[broken]]), tf.constant([3]))))


def test_infinities_that_cancel_are_reported():
    assert math.isnan(checked(tf.constant([math.inf]), tf.constant([-math.inf])))
