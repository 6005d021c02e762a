"""The inner loop under ParameterServerStrategy: the chief hands slices of steps to whichever worker is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from train.data import memory
from train.data.arrays import Split
from train.steps import LoopResult, Trainee


def asynchronous(
    strategy: tf.distribute.ParameterServerStrategy, trainee: Trainee, split: Split, steps_per_loop: int, workers: int
) -> Callable[[int, int, bool], LoopResult]:
    """Return a function that does some asynchronous steps: (steps done before, steps to do, stop?) -> result.

    A step is one worker's update from a whole global batch, and its batch follows from its number alone; so a slice
    that is handed out again after its worker died trains on the same examples, and each is seen once an epoch at any
    number of workers. Two updates may start from the same weights: that is this strategy, and why its runs do not
    repeat bit for bit.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def examples() -> tf.data.Dataset:
        # One element, the whole split: read by the worker itself, then handed out by reference.
        return tf.data.Dataset.from_tensors(0).map(lambda _: memory.load(split)).cache().repeat()

    @tf.function
    def slice_of_steps(iterator: Any, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        tensors = next(iterator)
        results_S2 = tf.zeros([steps_per_loop, 2])
        for done in tf.range(count):
            result_2 = strategy.run(trainee.update, args=(tensors, first + done, tf.constant(0, tf.int64)))
            results_S2 = tf.tensor_scatter_nd_update(results_S2, [[done]], [result_2])
        return results_S2

    iterator = iter(coordinator.create_per_worker_dataset(examples))

    def run(first: int, count: int, stop: bool) -> LoopResult:
        # Two slices a worker: a fast worker takes another one while a slow one finishes.
        size = max(1, count // (2 * workers))
        slices = [(at, min(size, first + count - at)) for at in range(first, first + count, size)]
        pending = [
            coordinator.schedule(slice_of_steps, (iterator, tf.constant(at, tf.int64), tf.constant(n, tf.int64)))
            for at, n in slices
        ]
        coordinator.join()
        results = [value.fetch()[:n] for value, (_, n) in zip(pending, slices, strict=True)]
        results_S2 = np.concatenate(results)
        return LoopResult(results_S2[:, 0], results_S2[:, 1], stop)

    return run
