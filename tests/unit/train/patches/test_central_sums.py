"""Sums over the replicas of CentralStorageStrategy; see train/patches/central_sums.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from train.patches import central_sums

PARTS_3N = np.random.default_rng(0).normal(size=(3, 1000)).astype("float32")


def sums(add: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> np.ndarray:
    """Add three tensors of which the first two are needed again."""

    @tf.function
    def add_parts(parts_3N: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        parts = [part + 0.0 for part in tf.unstack(tf.sin(parts_3N))]
        return add(parts), parts[:2]

    return add_parts(tf.constant(PARTS_3N))[0].numpy()


def test_replicas_are_added_in_their_order() -> None:
    first, second, third = tf.sin(PARTS_3N).numpy()
    in_order = (first + second) + third
    strategy = central_sums.create_strategy(["/CPU:0"])
    np.testing.assert_array_equal(in_order, sums(strategy.extended._cross_device_ops.accumulation_fn))
    assert (in_order != sums(tf.add_n)).any()  # else TensorFlow has repaired it
