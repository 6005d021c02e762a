"""The inner loops: many optimizer steps, or a whole evaluation, inside one call of a `tf.function`.

Shapes: B replica batch, K outputs, S steps of one loop, P parts of a step's results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from train.data import memory
from train.data.memory import Batch
from train.data.sources import Feed
from train.model import gradients as descent
from train.model import keras_compat
from train.model.objectives import Objective, global_mean
from train.telemetry.pace import Times
from train.telemetry.stopwatch import Lap, Stopwatch


@dataclass(frozen=True)
class Signals:
    """What one task wants, or what any task wants: all tasks see the same sum, so all act on it after the same step."""

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
        """Return what any of the tasks wants whose arrays were added up."""
        return cls(*(sum_3 > 0).tolist())


Wants = Callable[[bool, int], Signals]
"""Returns what this task wants: (was it asked to stop?, steps until that is acted on) -> signals."""


def wants_stop(stop: bool, _steps: int) -> Signals:
    """Want what every task may want: to stop where it was asked to."""
    return Signals(stop)


@dataclass(frozen=True)
class LoopResult:
    """What some optimizer steps gave, over all replicas."""

    losses: np.ndarray
    """`[S] float32`: loss of each step's global batch, regularisation included, before the step's update."""
    scores: np.ndarray
    """`[S] float32`: mean score of each step's global batch."""
    signals: Signals
    """What any task wants."""
    times: Times | None = None
    """What the steps took this task, where that can be measured."""


@dataclass(frozen=True)
class Trainee:
    """What is trained, and how."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    objective: Objective
    global_batch: int
    num_replicas: int

    @property
    def parts(self) -> int:
        """How many shares of each step's loss `advance` tells apart."""
        return 1

    def advance(self, feed: Feed, given: Any, step: tf.Tensor, replica: tf.Tensor, lap: Lap) -> tf.Tensor:
        """Do this replica's part of one optimizer step on what the feed gave; return `[parts, 2]`, see `update`."""
        batch = feed.batch(given, step, replica)
        lap.has_batch(batch)
        return self.update(batch, step, replica, lap)[tf.newaxis]

    def update(self, batch: Batch, step: tf.Tensor, replica: tf.Tensor, lap: Lap | None = None) -> tf.Tensor:
        """Do this replica's part of one optimizer step.

        Args:
            batch: this replica's examples.
            step: int64 scalar, optimizer steps done before this one.
            replica: int64 scalar, this replica's place in the global batch.
            lap: told when the gradients are computed.

        Returns:
            `[2] float32`: this replica's share of the loss and of the score.
        """
        with keras_compat.random_place(step, replica), tf.GradientTape() as tape:
            loss, score = self.shares(batch)
        variables = [variable.value for variable in self.model.trainable_variables]
        gradients = tape.gradient(loss, variables, output_gradients=descent.seed(self.optimizer))
        if lap:
            lap.has_gradients(gradients)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return tf.stack([descent.told(self.optimizer, loss, gradients), score])

    def shares(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Return a replica's share of the loss and of the score.

        The replicas' shares of the loss add up to what one device would compute for the whole batch: example losses
        divided by the global batch, and the model's own losses (regularisation), which every replica computes whole,
        by the number of replicas.
        """
        outputs_BK = full_precision(self.model(tf.cast(batch.features, tf.float32), training=True))
        losses_B = self.objective.loss(batch.labels, outputs_BK)
        loss = global_mean(losses_B, batch.weights, self.global_batch)
        if self.model.losses:
            loss += tf.add_n([tf.cast(term, tf.float32) for term in self.model.losses]) / self.num_replicas
        scores_B = self.objective.score(batch.labels, outputs_BK)
        return loss, global_mean(scores_B, tf.ones_like(batch.weights), self.global_batch)


def synchronous(
    strategy: tf.distribute.Strategy,
    trainee: Trainee,
    feed: Feed,
    steps_per_loop: int,
    wants: Wants = wants_stop,
) -> Callable[[int, int, bool], LoopResult]:
    """Return a function that does some synchronous steps: (steps done before, steps to do, stop?) -> result.

    It is traced once whatever the number of steps, and talks to the other tasks once a step (gradients) and once more
    at its end (results and signals). `wants` says, before the steps, what this task wants.
    """
    watch = Stopwatch(strategy)

    def start() -> tf.Tensor:
        return tf.zeros([steps_per_loop, trainee.parts, 2])

    def one_step(
        results_SP2: tf.Tensor, given: Any, first: tf.Tensor, done: tf.Tensor, marked: tuple[tf.Tensor, ...]
    ) -> tf.Tensor:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        result_P2 = trainee.advance(feed, given, first + done, replica, watch.lap(*marked))
        return tf.tensor_scatter_nd_update(results_SP2, [[done]], [result_P2])

    @tf.function(autograph=False)  # a call of its own, so that all it does is done when its results are there
    def all_replicas(*args: Any) -> Any:
        return strategy.run(one_step, args=args)

    def join(results_SP2: tf.Tensor, signals_3: tf.Tensor) -> tf.Tensor:
        return tf.concat([tf.reshape(results_SP2, [-1]), signals_3], 0)

    @tf.function(autograph=False)
    def loop(first: tf.Tensor, count: tf.Tensor, signals_3: tf.Tensor, every: tf.Tensor, given: Any) -> Any:
        def step(done: tf.Tensor, state: Any) -> Any:
            results, given = state
            marked = watch.begin(done, every)
            if not feed.ahead:
                return strategy.run(one_step, args=(results, feed.next(), first, done, marked)), given
            following = feed.next()
            results = all_replicas(results, given, first, done, marked)
            return results, watch.has_next(results, following, *marked)

        results, given = repeat(count, step, (strategy.run(start), given))
        watch.end((results, given))
        return strategy.reduce("SUM", strategy.run(join, args=(results, signals_3)), axis=None), given

    given: Any = None if feed.ahead else ()  # for the next step, where the feed is asked one step early

    def run(first: int, count: int, stop: bool) -> LoopResult:
        nonlocal given
        signals_3 = tf.constant(wants(stop, count).to_array())
        numbers = [tf.constant(number, tf.int64) for number in (first, count, watch.every)]
        began = time.perf_counter()
        given = feed.next() if given is None else given
        told, given = loop(numbers[0], numbers[1], signals_3, numbers[2], given)
        flat = told.numpy()
        times = watch.take(count, time.perf_counter() - began)
        results_S2 = flat[:-3].reshape(steps_per_loop, trainee.parts, 2)[:count].sum(1)
        return LoopResult(results_S2[:, 0], results_S2[:, 1], Signals.from_sum(flat[-3:]), times)

    return run


def full_precision(outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return a model's outputs in float32, whatever its layers compute in: losses are computed in that."""
    return tf.cast(outputs_BK, tf.float32)


def repeat(count: tf.Tensor, body: Callable[[tf.Tensor, Any], Any], state: Any) -> Any:
    """Return what `body` makes of `state` when it is called `count` times, with how often it was called before.

    Autograph would make the same of a `for`, but to convert all that is called in it takes longer than to trace it.
    """

    def step(done: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        return done + 1, body(done, state)

    return tf.while_loop(lambda done, _: done < count, step, (tf.zeros([], count.dtype), state))[1]


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
    """Return a function: what this task wants -> what any task wants; all tasks call it at the same step."""
    total = _total(strategy)
    return lambda signals: Signals.from_sum(total(tf.constant(signals.to_array())).numpy())


def _total(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that adds up each task's value over all replicas."""

    @tf.function(autograph=False)
    def total(value: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(lambda: tf.identity(value)), axis=None)

    return total


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
    batches = memory.eval_batches(num_examples, replica_batch=batch, num_replicas=replicas)

    def start() -> tf.Tensor:
        return tf.zeros([batches * replicas, 2])

    def add(totals_N2: tf.Tensor, given: Any, at: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group if strategy else 0
        replica = tf.cast(replica, tf.int64)
        examples = feed.batch(given, at, replica)
        outputs_BK = full_precision(model(tf.cast(examples.features, tf.float32), training=False))
        losses_B = objective.loss(examples.labels, outputs_BK) * examples.weights
        scores_B = objective.score(examples.labels, outputs_BK) * examples.weights
        totals_2 = tf.stack([tf.reduce_sum(losses_B), tf.reduce_sum(scores_B)])
        return tf.tensor_scatter_nd_update(totals_N2, [[at * replicas + replica]], [totals_2])

    @tf.function(autograph=False)
    def evaluate_all() -> tf.Tensor:
        def evaluate(at: tf.Tensor, totals: Any) -> Any:
            arguments = (totals, feed.next(), at)
            return strategy.run(add, args=arguments) if strategy else add(*arguments)

        totals = repeat(tf.constant(batches, tf.int64), evaluate, strategy.run(start) if strategy else start())
        return strategy.reduce("SUM", totals, axis=None) if strategy else totals

    def run() -> dict[str, float]:
        # Each replica has told of batches of its own, which are those of any other number of replicas: so is their sum.
        loss, score = evaluate_all().numpy().astype(np.float64).cumsum(0)[-1].tolist()
        return {"eval_loss": loss / num_examples, f"eval_{objective.score_name}": score / num_examples}

    return run
