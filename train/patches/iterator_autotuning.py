"""An iterator ends at once.

Defect: TensorFlow wakes the thread that tunes an iterator before it sets the flag that ends the thread. A quick thread
misses the flag and sleeps for as long as the iterator has lived (at most 60 s). The deletion of the iterator waits for
it and holds Python's lock, a parameter server's worker answers no request, and a script ends that much later.
Versions: TensorFlow 2.21.0.
Test: tests/process/train/test_iterator_autotuning.py
Not applied: to datasets that set `autotune.enabled`, or on more CPUs than TensorFlow's `AUTOTUNE` uses without tuning.

Without tuning, `AUTOTUNE` is one call per CPU; buffers of `prefetch` grow as before.
"""

import os

import tensorflow as tf

UNTUNED_CALLS = 16
"""Most parallel calls of `AUTOTUNE` without tuning (`kAutotuneDefaultParallelism` in TensorFlow)."""


def _disable_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset that an iterator is made of; replaces an option of `tf.data`'s debug mode, which stays."""
    dataset = _original(dataset)
    if dataset._options_attr.autotune.enabled is not None or len(os.sched_getaffinity(0)) > UNTUNED_CALLS:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


_original = tf.data.Dataset._apply_debug_options
REPLACED = [(tf.data.Dataset, "_apply_debug_options", _disable_autotuning, {"defect": "DEBUG_MODE"})]
