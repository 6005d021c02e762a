"""The inner loop: many optimizer steps inside one call of a `tf.function`.

Shapes: S steps of one loop, P parts of a step's results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.contract.run.records import Place
from train.data.feeds import Feed
from train.loops.train_step import TrainStep, repeat
from train.model import masks
from train.model.objectives import Objective
from train.telemetry.positions import Positions
from train.telemetry.step_timer import Marked, StepTimer, Times


@dataclass(frozen=True)
class Signals:
    """Requests of one task, or the union over all tasks, on which all of them act after the same step."""

    stop: bool = False
    save: bool = False
    brief: bool = False
    """Do fewer steps per inner call from now on, so that a checkpoint can follow each."""
    snapshot: bool = False

    def to_array(self) -> np.ndarray:
        """Return an array that can be added up over tasks: `[4] float32`."""
        return np.array([self.stop, self.save, self.brief, self.snapshot], np.float32)

    @classmethod
    def from_sum(cls, sum_4: np.ndarray) -> Signals:
        """Return the union of the requests whose arrays were added up."""
        return cls(*(sum_4 > 0).tolist())


Request = Callable[[int, int], Signals]
"""Returns the requests of this task: (steps of the call, steps until the tasks act on them) -> signals."""


def no_request(_count: int, _until: int) -> Signals:
    """Request nothing."""
    return Signals()


@dataclass(frozen=True)
class LoopResult:
    """Results of optimizer steps, over all replicas."""

    values: Mapping[str, np.ndarray]
    """`[S] float32` each: `loss` of each step's global batch before its update, including regularization; mean score of
    the batch, by the score's name."""
    signals: Signals
    times: Times | None = None

    @classmethod
    def of_columns(
        cls, results_S2: np.ndarray, objective: Objective, signals: Signals, times: Times | None = None
    ) -> LoopResult:
        """Return the result of steps from each step's loss and score, `[S, 2]`."""
        return cls({"loss": results_S2[:, 0], objective.score_name: results_S2[:, 1]}, signals, times)

    @property
    def losses(self) -> np.ndarray:
        return self.values["loss"]


class SynchronousSteps:
    """Does synchronous steps in one call: (steps done before, steps to do, requests of this task) -> result.

    The call is one `tf.function`, which is traced once for any number of steps. It exchanges gradients with the other
    tasks in every step, and results and signals once at its end.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        train_step: TrainStep,
        feed: Feed,
        steps_per_loop: int,
        positions: Positions | None = None,
    ) -> None:
        self._strategy, self._train_step, self._feed = strategy, train_step, feed
        self._steps_per_loop = steps_per_loop
        self._timer = StepTimer(strategy)
        self._positions = positions or Positions()
        self._mark_position = self._positions.set if self._timer.works else lambda *_, **__: None
        self._in_parts = train_step.accumulates or train_step.parts > 1
        # A separate function, so that all of its work is done once its results are available.
        self._called_step = tf.function(self._step, autograph=False)
        self._loop = tf.function(self._trace_loop, autograph=False)
        self._input: Any = None if feed.ahead else ()
        """The input of the next step, if the feed is called one step ahead."""

    def __call__(self, first: int, count: int, request: Request = no_request) -> LoopResult:
        signals_4 = tf.constant(request(count, count).to_array())
        numbers = [tf.constant(number, tf.int64) for number in (first, count, self._timer.every)]
        if not self._timer.works:
            self._positions.set(Place.EXCHANGE, first + 1)
        began = time.perf_counter()
        step_input = self._feed.next() if self._input is None else self._input
        flat, self._input = self._loop(numbers[0], numbers[1], signals_4, numbers[2], step_input)
        flat = flat.numpy()
        self._positions.set(Place.RESULTS, first + count, left=True)
        times = self._timer.take(count, time.perf_counter() - began)
        results_S2 = flat[:-4].reshape(self._steps_per_loop, self._train_step.parts, 2)[:count].sum(1)
        return LoopResult.of_columns(results_S2, self._train_step.objective, Signals.from_sum(flat[-4:]), times)

    def _trace_loop(
        self, first: tf.Tensor, count: tf.Tensor, signals_4: tf.Tensor, every: tf.Tensor, step_input: Any
    ) -> Any:
        def step(done: tf.Tensor, state: Any) -> Any:
            results, step_input = state
            self._mark_position(Place.EXCHANGE, first + done, left=True)
            marked = self._timer.begin(done, every)
            if not self._feed.ahead:
                return self._step(results, self._feed.next(), first + done, done, marked), step_input
            following = self._feed.next()
            results = self._called_step(results, step_input, first + done, done, marked)
            return results, self._timer.next_batch(results, following, marked)

        def join(results_SP2: tf.Tensor, signals_4: tf.Tensor) -> tf.Tensor:
            return tf.concat([tf.reshape(results_SP2, [-1]), signals_4], 0)

        shape = [self._steps_per_loop, self._train_step.parts, 2]
        results, step_input = repeat(count, step, (self._strategy.run(lambda: tf.zeros(shape)), step_input))
        self._timer.end((results, step_input))
        self._mark_position(Place.RESULTS, first + count, (results, step_input))
        total = self._strategy.reduce("SUM", self._strategy.run(join, args=(results, signals_4)), axis=None)
        return total, step_input

    def _step(self, results: Any, step_input: Any, step: tf.Tensor, done: tf.Tensor, marked: Marked) -> Any:
        def whole(results_SP2: tf.Tensor, step_input: Any, step: tf.Tensor, done: tf.Tensor, marked: Marked) -> Any:
            return self._update(results_SP2, self._compute(step_input, step, marked), step, done, marked)

        if not self._train_step.accumulates:
            return self._timer.run(whole, (results, step_input, step, done, marked))
        computed = self._train_step.accumulated(self._compute, self._timer.run, (step_input, step, marked))
        return self._timer.run(self._update, (results, computed, step, done, marked))

    def _compute(self, step_input: Any, step: tf.Tensor, marked: Marked, micro_batch: tf.Tensor | None = None) -> Any:
        marked = () if masks.is_counting() else self._timer.of_replica(marked)

        def batch_of(part: tf.Tensor) -> Any:
            if self._in_parts:
                self._timer.mark("asks", marked, part)
            examples = self._feed.batch(step_input, step, part)
            self._timer.mark("batch", marked, examples)
            return examples

        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        return self._train_step.compute(batch_of, step, replica, micro_batch)

    def _update(self, results_SP2: tf.Tensor, computed: Any, step: tf.Tensor, done: tf.Tensor, marked: Marked) -> Any:
        if marked := self._timer.of_replica(marked):
            self._timer.mark("computed", marked, computed.gradients)
            self._mark_position(Place.EXCHANGE, step + 1, computed.gradients)
        return tf.tensor_scatter_nd_update(results_SP2, [[done]], [self._train_step.update(computed)])


def gathering(strategy: tf.distribute.Strategy) -> Callable[[int], list[int]]:
    """Return a collective function from this task's number to a list of each replica's task's number."""
    replicas = strategy.num_replicas_in_sync
    gather = summing(strategy, lambda replica, number: number * tf.one_hot(replica, replicas, dtype=tf.int64))
    return lambda number: gather(tf.constant(number, tf.int64)).numpy().tolist()


def broadcasting(strategy: tf.distribute.Strategy) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a collective function (`[N] int64`, replica) -> the array of that replica's task."""
    broadcast = summing(
        strategy, lambda replica, words_N, sender: tf.where(replica == sender, words_N, tf.zeros_like(words_N))
    )
    return lambda words_N, sender: broadcast(words_N, tf.constant(sender, tf.int32)).numpy()


def agreement(strategy: tf.distribute.Strategy) -> Callable[[Signals], Signals]:
    """Return a collective function from this task's signals to the union of all tasks', to call at the same step."""
    sum_up = summing(strategy)
    return lambda signals: Signals.from_sum(sum_up(tf.constant(signals.to_array())).numpy())


def summing(
    strategy: tf.distribute.Strategy, part: Callable[..., tf.Tensor] = lambda _replica, value: tf.identity(value)
) -> Callable[..., tf.Tensor]:
    """Return a collective function that sums `part(replica, *arguments)` over all replicas."""

    @tf.function(autograph=False)
    def sum_up(*args: tf.Tensor) -> tf.Tensor:
        def of_replica() -> tf.Tensor:
            return part(tf.distribute.get_replica_context().replica_id_in_sync_group, *args)

        return strategy.reduce("SUM", strategy.run(of_replica), axis=None)

    return sum_up
