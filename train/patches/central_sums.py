"""CentralStorageStrategy adds the gradients of its replicas in their order.

Defect: AddN begins with whichever input has no other user left, which depends on timing. With three or more replicas, a
repeated run gives different bits.
Versions: TensorFlow 2.21.0.
Test: tests/unit/train/patches/test_gradients.py::test_replicas_are_added_in_their_order
Not applied: to other strategies, which use collective operations.
"""

from collections.abc import Sequence

import tensorflow as tf


def create_strategy(devices: Sequence[str]) -> tf.distribute.Strategy:
    """Create a CentralStorageStrategy on these devices that adds in the order of its replicas."""
    strategy = tf.distribute.experimental.CentralStorageStrategy(devices)
    strategy.extended._cross_device_ops = tf.distribute.ReductionToOneDevice(
        strategy.extended._cross_device_ops.reduce_to_device,
        # A chain of additions would not do: TensorFlow makes an AddN of it.
        lambda tensors: tf.reduce_sum(tf.stack(tensors), 0),
    )
    return strategy
