"""Sums whose bits do not depend on their order: over replicas and shards, however these are arranged.

Floating point rounds after every addition, so `(a + b) + c` and `a + (b + c)` differ. Whole numbers do not: here every
number is put on a grid that all replicas agree on, fine enough for a float32 that is 2**36 times smaller than the
largest to keep all of its digits (with 8 shards), and the sums of whole numbers are exact. One reduction of a few
numbers finds the grid, one of 8 bytes a number adds up.

Source: J. Demmel and H. D. Nguyen, Parallel Reproducible Summation, IEEE Transactions on Computers 64 (2015): numbers
rounded to a common grid beforehand add up alike in every order.

Shapes: T tensors, n shards of this replica, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_FRACTION_BITS, _BIAS, _NOT_FINITE = 23, 127, 255  # of a float32: IEEE 754
_FRACTION_BITS_64, _BIAS_64 = 52, 1023


def exact_sum(parts: Sequence[tf.Tensor], shards: int) -> list[tf.Tensor]:
    """Return each tensor's sum over the shards of all replicas; every replica calls it, and gets the same bits.

    Args:
        parts: for each tensor what this replica's shards have, `[n, ...] float32`.
        shards: of all replicas together.

    Returns:
        The sums, `[...] float64`; NaN where one of a tensor's numbers was not finite.
    """
    exponents = tf.unstack(_largest_over_replicas(tf.stack([_largest_exponent(part) for part in parts])))
    # |x| < 2**(exponent + 1), so that all shards together stay below 2**62.
    shifts = [62 - (shards - 1).bit_length() - (exponent - _BIAS + 1) for exponent in exponents]
    grids = [_on_grid(part, shift) for part, shift in zip(parts, shifts, strict=True)]
    context = tf.distribute.get_replica_context()
    total = context.all_reduce("SUM", tf.concat([tf.reshape(grid, [-1]) for grid in grids], 0))
    sums = []
    for flat, grid, shift, exponent in zip(
        tf.split(total, [grid.shape.num_elements() for grid in grids]), grids, shifts, exponents, strict=True
    ):
        value = tf.cast(tf.reshape(flat, grid.shape), tf.float64) * _power_of_two(-shift)
        sums.append(tf.where(exponent == _NOT_FINITE, tf.constant(float("nan"), tf.float64), value))
    return sums


def _on_grid(part: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    """Return the sum over the first axis of `part * 2**shift`, each rounded: `[...] int64`."""
    scaled = tf.cast(part, tf.float64) * _power_of_two(shift)
    return tf.ensure_shape(tf.reduce_sum(tf.cast(tf.round(scaled), tf.int64), 0), part.shape[1:])


def _largest_exponent(part: tf.Tensor) -> tf.Tensor:
    """Return the largest biased exponent in a float32 tensor, int64 scalar: whole numbers, so no NaN gets lost."""
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(part, tf.int32), tf.constant(2**31 - 1, tf.int32))
    largest = tf.maximum(tf.reduce_max(magnitudes), 0)  # of no number at all it is the smallest there is
    return tf.cast(tf.bitwise.right_shift(largest, _FRACTION_BITS), tf.int64)


def _largest_over_replicas(own_T: tf.Tensor) -> tf.Tensor:
    """Return the elementwise maximum over all replicas, `[T]`. Strategies only add up, so each has a row of its own."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return own_T
    row_R = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync, dtype=own_T.dtype)
    return tf.reduce_max(context.all_reduce("SUM", row_R[:, tf.newaxis] * own_T), 0)


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2**exponent for an int64 scalar, float64 scalar: put together from its bits, so exact on any device."""
    return tf.bitcast(tf.bitwise.left_shift(exponent + _BIAS_64, tf.constant(_FRACTION_BITS_64, tf.int64)), tf.float64)
