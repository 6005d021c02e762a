"""Deleting an iterator of `tf.data` takes no time, although TensorFlow's own waits for a thread that overslept."""

import hashlib
import threading
import time
from collections.abc import Iterator

import pytest
import tensorflow as tf

from train.data.batches import without_sharding
from train.patches import iterator_autotuning

LIVED_S = 3.0
"""TensorFlow's thread then sleeps until 5.1 s after its start."""


@pytest.fixture
def busy() -> Iterator[None]:
    """Four threads that compute without Python's lock."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


def numbers() -> tf.data.Dataset:
    mapped = tf.data.Dataset.range(100).repeat().map(tf.negative, num_parallel_calls=tf.data.AUTOTUNE)
    return mapped.prefetch(tf.data.AUTOTUNE)


def test_a_deleted_iterator_must_not_wait_for_its_autotuning(monkeypatch, busy):
    monkeypatch.setattr(tf.data.Dataset, "_apply_debug_options", iterator_autotuning._disable_autotuning)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    dataset = strategy.experimental_distribute_dataset(without_sharding(numbers()))
    iterators = [iter(dataset) for _ in range(8)]
    started = time.monotonic()
    while time.monotonic() - started < LIVED_S:
        for iterator in iterators:
            next(iterator)
    durations = []
    while iterators:
        started = time.monotonic()
        del iterator
        iterator = iterators.pop()
        durations.append(time.monotonic() - started)
    assert max(durations) < LIVED_S / 4


def test_a_dataset_keeps_its_own_setting():
    assert iterator_autotuning._disable_autotuning(numbers()).options().autotune.enabled is False
    options = tf.data.Options()
    options.autotune.enabled = True
    tuned = numbers().with_options(options).map(tf.negative)
    assert iterator_autotuning._disable_autotuning(tuned).options().autotune.enabled is True
