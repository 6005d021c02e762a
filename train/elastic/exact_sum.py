"""Sums over replicas and shards whose bits do not depend on the order of additions.

Floating point rounds after every addition, so `(a + b) + c` and `a + (b + c)` differ. Sums of whole numbers are exact,
so every number is rounded to a grid that all replicas share. One reduction of a byte per replica determines each grid,
and one of 8 bytes per number adds up.

Each row of a tensor (its last axis) and each number of a vector has a separate grid, so that a row of an embedding
keeps its digits next to a much larger one. With 8 shards a float32 keeps all of its digits unless it is more than 2**36
times smaller than the largest number of its row; a number more than 2**61 times smaller counts as 0.

Source: J. Demmel and H. D. Nguyen, Parallel Reproducible Summation, IEEE Transactions on Computers 64 (2015): numbers
that were rounded to a common grid add up to the same sum in every order.

Shapes: n shards of this replica, R replicas, W words of 8 bytes for a byte of each replica, E rows of all tensors.
"""

from collections.abc import Sequence

import tensorflow as tf

_FRACTION_BITS, _BIAS, _NOT_FINITE = 23, 127, 255  # of a float32: IEEE 754
_FRACTION_BITS_64, _BIAS_64 = 52, 1023
_SUM_BITS = 63  # of an int64 without its sign


def exact_sum(parts: Sequence[tf.Tensor], shards: int) -> list[tf.Tensor]:
    """Add up tensors over the shards of all replicas; every replica calls it and gets the same bits.

    Parts are `[n, ...] float32` for a replica's n shards, sums `[...] float64`: NaN in rows with an infinity or NaN.
    """
    exponents = _largest_over_replicas([_largest_exponents(part) for part in parts])
    # |x| < 2**(exponent + 1), so that the sum of all shards is below 2**63.
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
    """Return the largest biased exponent in each row of float32 tensors, `[..., 1] int64`; for vectors of each number.

    The comparison as integers preserves NaN.
    """
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(part, tf.int32), tf.constant(2**31 - 1, tf.int32))
    largest = tf.reduce_max(magnitudes, 0)
    if part.shape.rank > 2:
        largest = tf.reduce_max(largest, -1, keepdims=True)
    largest = tf.maximum(largest, 0)  # the maximum of no numbers is the smallest int32
    return tf.cast(tf.bitwise.right_shift(largest, _FRACTION_BITS), tf.int64)


def _largest_over_replicas(local: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the elementwise maxima over all replicas. Strategies only add up, so each replica fills in one byte."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return local
    local_E = tf.concat([tf.reshape(exponents, [-1]) for exponents in local], 0)
    replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
    word_W = tf.one_hot(replica // 8, -(-context.num_replicas_in_sync // 8), dtype=tf.int64)
    words_WE = word_W[:, tf.newaxis] * tf.bitwise.left_shift(local_E, 8 * (replica % 8))
    bytes_WE8 = tf.bitcast(context.all_reduce("SUM", words_WE), tf.uint8)
    largest_E = tf.cast(tf.reduce_max(tf.cast(bytes_WE8, tf.int32), [0, 2]), tf.int64)
    flats = tf.split(largest_E, [exponents.shape.num_elements() for exponents in local])
    return [tf.reshape(flat, exponents.shape) for flat, exponents in zip(flats, local, strict=True)]


def _power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2**exponent for int64 numbers as float64, composed of bits and so exact on any device."""
    return tf.bitcast(tf.bitwise.left_shift(exponent + _BIAS_64, tf.constant(_FRACTION_BITS_64, tf.int64)), tf.float64)
