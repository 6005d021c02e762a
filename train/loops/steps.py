"""The inner loops: many optimizer steps, or a whole evaluation, inside one call of a `tf.function`.

Shapes: B replica batch, K outputs, S steps of one loop, P parts of a step's results, N batches of all replicas, M
means that an evaluation reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from train.data.batches import Batch, eval_batches
from train.data.sources import Feed
from train.loops.train_step import TrainStep, as_input, full_precision, repeat
from train.model import masks
from train.model.objectives import Objective, PerExample
from train.named import Named
from train.telemetry.step_timer import Marked, ReplicaTimer, StepTimer
from train.telemetry.timing import Times


@dataclass(frozen=True)
class Signals:
    """What one task requests, or any task: all tasks see the same sum, so all act on it after the same step."""

    stop: bool = False
    """Training ends."""
    save: bool = False
    """A checkpoint is saved."""
    brief: bool = False
    """Inner calls do fewer steps from now on, so that a checkpoint can follow each."""

    def to_array(self) -> np.ndarray:
        """Return what can be added up over tasks: `[3] float32`."""
        return np.array([self.stop, self.save, self.brief], np.float32)

    @classmethod
    def from_sum(cls, sum_3: np.ndarray) -> Signals:
        """Return what any of the tasks requests whose arrays were added up."""
        return cls(*(sum_3 > 0).tolist())


OwnSignals = Callable[[bool, int], Signals]
"""Returns what this task requests: (is it to stop?, steps until that is acted on) -> signals."""


def stop_signal(stop: bool, _steps: int) -> Signals:
    """Request what every task may: to stop where it was requested to."""
    return Signals(stop)


@dataclass(frozen=True)
class LoopResult:
    """What some optimizer steps gave, over all replicas."""

    losses: np.ndarray
    """`[S] float32`: loss of each step's global batch, regularisation included, before the step's update."""
    scores: np.ndarray
    """`[S] float32`: mean score of each step's global batch."""
    signals: Signals
    """What any task requests."""
    times: Times | None = None
    """What the steps took this task, where that can be measured."""


def synchronous(
    strategy: tf.distribute.Strategy,
    train_step: TrainStep,
    feed: Feed,
    steps_per_loop: int,
    signals: OwnSignals = stop_signal,
) -> Callable[[int, int, bool], LoopResult]:
    """Return a function that does some synchronous steps: (steps done before, steps to do, stop?) -> result.

    It is traced once whatever the number of steps, and talks to the other tasks once a step (gradients) and once more
    at its end (results and signals). `signals` returns, before the steps, what this task requests. A call of 0 steps
    traces and compiles it, and changes nothing.
    """
    timer = StepTimer(strategy)
    in_parts = train_step.accumulates or train_step.parts > 1

    def compute(marks: ReplicaTimer, given: Any, step: tf.Tensor, micro_batch: tf.Tensor | None = None) -> Any:
        marks = ReplicaTimer() if masks.is_counting() else marks
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        batch_of = marks.feed(lambda part: feed.batch(given, step, part), in_parts=in_parts)
        return train_step.compute(batch_of, step, replica, micro_batch)

    def update(marks: ReplicaTimer, results_SP2: tf.Tensor, computed: Any, done: tf.Tensor) -> tf.Tensor:
        marks.computed(computed.gradients)
        return tf.tensor_scatter_nd_update(results_SP2, [[done]], [train_step.update(computed)])

    def whole(results_SP2: tf.Tensor, given: Any, step: tf.Tensor, done: tf.Tensor, marked: Marked) -> tf.Tensor:
        marks = timer.replica(marked)
        return update(marks, results_SP2, compute(marks, given, step), done)

    def one_step(results: Any, given: Any, step: tf.Tensor, done: tf.Tensor, marked: Marked) -> Any:
        if not train_step.accumulates:
            return timer.run(whole, (results, given, step, done, marked))
        computed = train_step.accumulated(
            lambda given, step, marked, micro_batch: compute(timer.replica(marked), given, step, micro_batch),
            timer.run,
            (given, step, marked),
        )
        return timer.run(lambda marked, *args: update(timer.replica(marked), *args), (marked, results, computed, done))

    # A call of its own, so that all it does is done when its results are there.
    called_step = tf.function(one_step, autograph=False)

    @tf.function(autograph=False)
    def loop(first: tf.Tensor, count: tf.Tensor, signals_3: tf.Tensor, every: tf.Tensor, given: Any) -> Any:
        def step(done: tf.Tensor, state: Any) -> Any:
            results, given = state
            marked = timer.begin(done, every)
            if not feed.ahead:
                return one_step(results, feed.next(), first + done, done, marked), given
            following = feed.next()
            results = called_step(results, given, first + done, done, marked)
            return results, timer.next_batch(results, following, marked)

        def start() -> tf.Tensor:
            return tf.zeros([steps_per_loop, train_step.parts, 2])

        def join(results_SP2: tf.Tensor, signals_3: tf.Tensor) -> tf.Tensor:
            return tf.concat([tf.reshape(results_SP2, [-1]), signals_3], 0)

        results, given = repeat(count, step, (strategy.run(start), given))
        timer.end((results, given))
        return strategy.reduce("SUM", strategy.run(join, args=(results, signals_3)), axis=None), given

    given: Any = None if feed.ahead else ()  # for the next step, where the feed is called one step early

    def run(first: int, count: int, stop: bool) -> LoopResult:
        nonlocal given
        signals_3 = tf.constant(signals(stop, count).to_array())
        numbers = [tf.constant(number, tf.int64) for number in (first, count, timer.every)]
        began = time.perf_counter()
        given = feed.next() if given is None else given
        flat, given = loop(numbers[0], numbers[1], signals_3, numbers[2], given)
        flat = flat.numpy()
        times = timer.take(count, time.perf_counter() - began)
        results_S2 = flat[:-3].reshape(steps_per_loop, train_step.parts, 2)[:count].sum(1)
        return LoopResult(results_S2[:, 0], results_S2[:, 1], Signals.from_sum(flat[-3:]), times)

    return run


def gathering(strategy: tf.distribute.Strategy) -> Callable[[int], list[int]]:
    """Return a function: this task's number -> the number of each replica's task; all tasks call it."""
    replicas = strategy.num_replicas_in_sync

    @tf.function(autograph=False)
    def gather(number: tf.Tensor) -> tf.Tensor:
        def placed() -> tf.Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return number * tf.one_hot(replica, replicas, dtype=tf.int64)

        return strategy.reduce("SUM", strategy.run(placed), axis=None)

    return lambda number: gather(tf.constant(number, tf.int64)).numpy().tolist()


def agreement(strategy: tf.distribute.Strategy) -> Callable[[Signals], Signals]:
    """Return a function: what this task requests -> what any does; all tasks call it at the same step."""
    sum_up = total(strategy)
    return lambda signals: Signals.from_sum(sum_up(tf.constant(signals.to_array())).numpy())


def total(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that adds up each task's value over all replicas."""

    @tf.function(autograph=False)
    def sum_up(value: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(lambda: tf.identity(value)), axis=None)

    return sum_up


def evaluation(
    strategy: tf.distribute.Strategy | None,
    model: keras.Model,
    objective: Objective,
    feed: Feed,
    *,
    num_examples: int,
    batch: int,
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the model on every example of a split exactly once, at any replica count.

    Args:
        strategy: whose replicas share the work; every task calls the function. None: this task does it all.
        model: what is evaluated.
        objective: by what.
        feed: the split's batches, padding with weight 0.
        num_examples: of the split.
        batch: examples that one replica takes at once.
    """
    replicas = strategy.num_replicas_in_sync if strategy else 1
    batches = eval_batches(num_examples, replica_batch=batch, num_replicas=replicas)

    def start() -> tf.Tensor:
        return tf.zeros([batches * replicas, 2, len(objective.reported)])

    def add(totals_N2M: tf.Tensor, given: Any, at: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group if strategy else 0
        replica = tf.cast(replica, tf.int64)
        examples = feed.batch(given, at, replica)
        outputs_BK = full_precision(model(as_input(model, examples.features), training=False))
        totals_M2 = [totals(of, examples, outputs_BK) for of in objective.reported.values()]
        return tf.tensor_scatter_nd_update(totals_N2M, [[at * replicas + replica]], [tf.transpose(totals_M2)])

    @tf.function(autograph=False)
    def evaluate_all() -> tf.Tensor:
        def evaluate(at: tf.Tensor, totals: Any) -> Any:
            arguments = (totals, feed.next(), at)
            return strategy.run(add, args=arguments) if strategy else add(*arguments)

        totals = repeat(tf.constant(batches, tf.int64), evaluate, strategy.run(start) if strategy else start())
        return strategy.reduce("SUM", totals, axis=None) if strategy else totals

    return lambda: results(evaluate_all().numpy(), objective)


def totals(function: PerExample, examples: Batch, outputs_BK: Named) -> list[tf.Tensor]:
    """Return the sum of a function's values, and the number of examples, or of positions without a mask, in it."""
    with masks.summed() as counts:
        values_B = function(examples.labels, outputs_BK)
    counts_B = counts[0] if counts else tf.ones_like(examples.weights)
    return [tf.reduce_sum(values_B * examples.weights), tf.reduce_sum(counts_B * examples.weights)]


def results(totals_N2M: np.ndarray, objective: Objective) -> dict[str, float]:
    """Return the results of an evaluation from the sums and the counts of each batch, in the order of `reported`.

    Each replica has filled in batches of its own, the same ones at any number of replicas: so are these results.
    """
    sums, counts = totals_N2M.astype(np.float64).cumsum(0)[-1].tolist()
    parts = zip(objective.reported, sums, counts, strict=True)
    means = {f"eval_{name}": total / count if count else 0.0 for name, total, count in parts}
    if objective.heads:  # each may have a mask of its own
        losses = (head.weight * means[f"eval_{name}_loss"] for name, head in objective.heads.items())
        means["eval_loss"] = sum(losses)
    return means | ({"eval_perplexity": _exp(means["eval_loss"])} if objective.predicts_text else {})


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
