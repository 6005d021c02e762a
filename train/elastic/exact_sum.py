"""Sums whose bits do not depend on their order: over replicas and shards, however these are arranged.

Floating point rounds after every addition, so `(a + b) + c` and `a + (b + c)` differ. Whole numbers do not: here every
number is put on a grid that all replicas agree on, and the sums of whole numbers are exact. One reduction of a byte a
replica finds each grid, one of 8 bytes a number adds up.

Each row of a tensor (its last axis) and each number of a vector has a grid of its own, so that a row of an embedding
keeps its digits beside another one that is very much larger. With 8 shards a grid is fine enough for a float32 to keep
all of its digits unless it is more than 2**36 times smaller than the largest of its row; what is more than
2**61 times smaller counts as 0.

Source: J. Demmel and H. D. Nguyen, Parallel Reproducible Summation, IEEE Transactions on Computers 64 (2015): numbers
rounded to a common grid beforehand add up alike in every order.

Shapes: n shards of this replica, R replicas, W words of 8 bytes for a byte of each replica, E rows of all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_FRACTION_BITS, _BIAS, _NOT_FINITE = 23, 127, 255  # of a float32: IEEE 754
_FRACTION_BITS_64, _BIAS_64 = 52, 1023
_SUM_BITS = 63  # of an int64 without its sign


def exact_sum(parts: Sequence[tf.Tensor], shards: int) -> list[tf.Tensor]:
    """Return each tensor's sum over the shards of all replicas; every replica calls it, and gets the same bits.

    Args:
        parts: for each tensor what this replica's shards have, `[n, ...] float32`.
        shards: of all replicas together.

    Returns:
        The sums, `[...] float64`; NaN in the rows that had a number that was not finite.
    """
    exponents = _largest_over_replicas([_largest_exponents(part) for part in parts])
    # |x| < 2**(exponent + 1), so that all shards together stay below 2**63.
    shifts = [_SUM_BITS - (shards - 1).bit_length() - (exponent - _BIAS + 1) for exponent in exponents]
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


def _largest_exponents(part: tf.Tensor) -> tf.Tensor:
    """Return the largest biased exponent in each row of float32 tensors, `[..., 1] int64`; of vectors in each place.

    They are found among whole numbers, so that no NaN gets lost.
    """
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(part, tf.int32), tf.constant(2**31 - 1, tf.int32))
    largest = tf.reduce_max(magnitudes, 0)
    if part.shape.rank > 2:
        largest = tf.reduce_max(largest, -1, keepdims=True)
    largest = tf.maximum(largest, 0)  # of no number at all it is the smallest there is
    return tf.cast(tf.bitwise.right_shift(largest, _FRACTION_BITS), tf.int64)


def _largest_over_replicas(own: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the elementwise maxima over all replicas. Strategies only add up, so each fills in a byte of its own."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return own
    own_E = tf.concat([tf.reshape(exponents, [-1]) for exponents in own], 0)
    replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
    word_W = tf.one_hot(replica // 8, -(-context.num_replicas_in_sync // 8), dtype=tf.int64)
    words_WE = word_W[:, tf.newaxis] * tf.bitwise.left_shift(own_E, 8 * (replica % 8))
    bytes_WE8 = tf.bitcast(context.all_reduce("SUM", words_WE), tf.uint8)
    largest_E = tf.cast(tf.reduce_max(tf.cast(bytes_WE8, tf.int32), [0, 2]), tf.int64)
    flats = tf.split(largest_E, [exponents.shape.num_elements() for exponents in own])
    return [tf.reshape(flat, exponents.shape) for flat, exponents in zip(flats, own, strict=True)]


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2**exponent for int64 numbers, in float64: put together from its bits, so exact on any device."""
    return tf.bitcast(tf.bitwise.left_shift(exponent + _BIAS_64, tf.constant(_FRACTION_BITS_64, tf.int64)), tf.float64)
