"""Replicas of a user's script draw different random numbers, such as the masks of dropout.

Defect: `SeedGenerator.next` counts its draws in a variable that all replicas share, so all of them draw alike.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_replicas_must_draw_different_masks
Not applied: if the source of `SeedGenerator.next` mentions replicas. The built-in trainer uses `placed_seeds.py`.
"""

from typing import Any

import keras
import tensorflow as tf

_REPLICA_STRIDE = 0x9E3779B1
"""An odd 32-bit number, so that its multiples modulo 2**32 all differ."""

_keras_next_seed = keras.random.SeedGenerator.next


def _next_seed(generator: Any, ordered: bool = True) -> Any:
    seed = _keras_next_seed(generator, ordered)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seed
    offset = tf.cast(context.replica_id_in_sync_group, seed.dtype) * tf.constant(_REPLICA_STRIDE, seed.dtype)
    return seed + tf.stack([offset, tf.zeros_like(offset)])


REPLACED = [(keras.random.SeedGenerator, "next", _next_seed, {"fixed": "replica"})]
