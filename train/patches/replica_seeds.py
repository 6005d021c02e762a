"""Replicas of a user's script draw different random numbers, such as the masks of dropout.

Defect: `SeedGenerator.next` counts its draws in a variable that all replicas share, so all of them draw alike. The
generator of `keras.random` without a seed belongs to a thread: each trace of a replica creates another, and fails.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_replicas_must_draw_different_masks
Not applied: if the source of `SeedGenerator.next` mentions replicas. The built-in trainer uses `placed_seeds.py`.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf
from keras.src.random import seed_generator  # has no public name

_REPLICA_STRIDE = 0x9E3779B1
"""An odd 32-bit number, so that its multiples modulo 2**32 all differ."""

_keras_next_seed = keras.random.SeedGenerator.next
_keras_unseeded = seed_generator.global_seed_generator


def _next_seed(generator: Any, ordered: bool = True) -> Any:
    seed = _keras_next_seed(generator, ordered)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seed
    offset = tf.cast(context.replica_id_in_sync_group, seed.dtype) * tf.constant(_REPLICA_STRIDE, seed.dtype)
    return seed + tf.stack([offset, tf.zeros_like(offset)])


def _unseeded() -> Any:
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return _of_replicas() if in_replica else _keras_unseeded()


@functools.cache
def _of_replicas() -> Any:
    with ThreadPoolExecutor(1) as outside:  # of the graph that is being traced, and of the strategy
        return outside.submit(keras.random.SeedGenerator).result()


REPLACED = [
    (keras.random.SeedGenerator, "next", _next_seed, {"fixed": "replica"}),
    (seed_generator, "global_seed_generator", _unseeded, {"fixed": "replica"}),
]
