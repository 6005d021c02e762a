"""The inner loop under ParameterServerStrategy: the chief schedules slices of steps on free workers."""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from train.context import TaskContext
from train.data.batches import Batch, BatchSlice
from train.data.feeds import train_batch
from train.loops.steps import LoopResult, Request, no_request
from train.loops.train_step import TrainStep, repeat


class AsynchronousSteps:
    """Does asynchronous steps: (steps done before, steps to do, requests of the chief) -> result.

    A step is one worker's update from a whole global batch. With arrays and random-access sources, the batch is
    determined by the step number, and each example is seen once per epoch with any number of workers. With a stream or
    the dataset of a function, each worker reads in a different order. Two updates may start from the same weights, so
    runs under this strategy are not bitwise repeatable.

    The slice of a worker that died is scheduled again. The result of each step is recorded on a parameter server after
    its update, and a recorded step is not repeated: only the step in which the worker died can update some or all
    variables twice.
    """

    def __init__(self, context: TaskContext, train_step: TrainStep) -> None:
        """Prepare the steps; the step records of workers get the last step of each slice once all slices are done."""
        strategy, source, seed = context.strategy, context.source, context.config.seed
        self._strategy, self._train_step, self._source = strategy, train_step, source
        self._batch_slice = BatchSlice(train_step.global_batch, seed)
        self._workers = context.worker_records()
        self._no_results = tf.fill([context.config.steps_per_loop, 2], math.nan)  # NaN: not done yet
        with strategy.scope():
            self._recorded_S2 = tf.Variable(self._no_results, trainable=False, name="recorded")
        # A separate function, so that a control dependency can wait for all of it.
        self._one_step = tf.function(self._trace_step, autograph=False)
        self._slice = tf.function(self._trace_slice, autograph=False)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        def worker_dataset() -> tf.data.Dataset:
            if source.in_memory:
                # One element, the whole split, which the worker reads once and then passes by reference.
                return tf.data.Dataset.from_tensors(0).map(lambda _: source.examples("train")).cache().repeat()
            if source.examples("train") is not None:
                return tf.data.Dataset.from_tensors(0)  # each step reads its batch
            return source.shuffled_batches(train_step.global_batch, seed)

        self._iterator = iter(self._coordinator.create_per_worker_dataset(worker_dataset))

    def __call__(self, first: int, count: int, request: Request = no_request) -> LoopResult:
        # Two slices per worker: a fast worker takes another one while a slow one finishes.
        size = max(1, count // (2 * len(self._workers)))
        slices = [(at, min(size, first + count - at)) for at in range(first, first + count, size)]
        self._recorded_S2.assign(self._no_results)
        pending = []
        for at, length in slices:
            numbers = (tf.constant(number, tf.int64) for number in (at, at - first, length))
            pending.append(self._coordinator.schedule(self._slice, (self._iterator, *numbers)))
        self._coordinator.join()
        results = []
        for value, (at, length) in zip(pending, slices, strict=True):
            worker = tf.DeviceSpec.from_string(value._values.device).task  # that computed this remote value
            self._workers[int(worker)].done(at + length)
            results.append(value.fetch()[:length])
        # The chief decides alone.
        return LoopResult.of_columns(np.concatenate(results), self._train_step.objective, request(count, 0))

    def _trace_slice(self, iterator: Any, first: tf.Tensor, place: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        examples = iterator.get_next() if self._source.in_memory else self._source.examples("train")

        def step(done: tf.Tensor, results_S2: tf.Tensor) -> tf.Tensor:
            if examples is None:
                batch = iterator.get_next()
            else:
                batch = train_batch(examples, first + done, tf.constant(0, tf.int64), self._batch_slice)
            before_2 = tf.gather(self._recorded_S2, place + done)

            def do() -> tf.Tensor:
                result_2 = self._one_step(batch, first + done)
                with tf.control_dependencies([result_2]):
                    self._recorded_S2.scatter_nd_update([[place + done]], [result_2])
                return result_2

            result_2 = tf.cond(tf.math.is_nan(before_2[0]), do, lambda: before_2)
            return tf.tensor_scatter_nd_update(results_S2, [[done]], [result_2])

        return repeat(count, step, tf.zeros(self._no_results.shape))

    def _trace_step(self, batch: Batch, step: tf.Tensor) -> tf.Tensor:
        train_step, run, args = self._train_step, self._strategy.run, (batch, step, tf.constant(0, tf.int64))
        if not train_step.accumulates:
            return run(lambda *args: train_step.update(train_step.compute_batch(*args))[0], args=args)
        computed = train_step.accumulated(train_step.compute_batch, run, args)
        return run(lambda computed: train_step.update(computed)[0], args=(computed,))
