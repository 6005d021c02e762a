"""The marks inside a step, in the order of what they are the times of; and the position of a task in its steps."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.contract.run.records import Place
from tests.support.waiting import wait_for
from train.data.batches import Batch, VirtualShards
from train.data.feeds import Feed
from train.elastic.shard_step import ElasticTrainStep
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import objectives
from train.model.gradients import GradientPolicy
from train.telemetry import step_timer
from train.telemetry.positions import Positions

STEPS = 4
BATCH = 4


@pytest.fixture
def marks(monkeypatch) -> list[tuple[str, float]]:
    """What is marked in the calls of the test, and when the batches were made."""
    seen: list[tuple[str, float]] = []

    def keep(taken: list[tuple[str, float]], original: Any = step_timer.times_from_marks) -> step_timer.Times:
        seen.extend(taken)
        return original(taken)

    monkeypatch.setattr(step_timer, "times_from_marks", keep)
    return seen


def train(
    made: list[tuple[str, float]], shards: int = 0, calls: int = 1, streams: bool = False, slow_s: float = 0
) -> Any:
    """Do some steps on one device, note in `made` when each batch is made, and return the last call's result."""
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)
    objective = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)
    what = (model, GradientPolicy(optimizer), objective, BATCH)
    train_step = ElasticTrainStep(*what, shards, shards=VirtualShards(shards, 1)) if shards else TrainStep(*what, 1)

    size = BATCH // (shards or 1)

    def note(_step: np.ndarray) -> np.ndarray:
        time.sleep(slow_s)
        made.append(("made", time.perf_counter()))
        return np.ones([size, 3], np.float32)

    def batch(_given: Any, step: tf.Tensor, _replica: tf.Tensor) -> Batch:
        features = tf.ensure_shape(tf.numpy_function(note, [step], tf.float32), [size, 3])
        return Batch(features, tf.zeros([size], tf.int64), tf.ones([size]))

    feed = Feed(lambda: (), batch)
    if streams:
        iterator = iter(tf.data.Dataset.range(1000).map(lambda number: batch((), number, number)))
        feed = Feed(iterator.get_next, lambda given, _step, _replica: given, ahead=True)
    inner = steps.SynchronousSteps(strategy, train_step, feed, STEPS)
    for call in range(calls):
        result = inner(call * STEPS, STEPS)
    return result


@pytest.mark.parametrize(("shards", "parts"), [(0, ["made", "batch"]), (2, ["asks", "made", "batch"] * 2)])
def test_each_step_is_marked_when_its_batch_or_virtual_shards_and_its_gradients_are_there(marks, shards, parts):
    made: list[tuple[str, float]] = []
    result = train(made, shards)
    noted = sorted([*marks, *made], key=lambda one: one[1])
    assert [*["begin", *parts, "computed"] * STEPS, "begin"] == [what for what, _ in noted]
    assert STEPS == len(result.times.steps)
    assert (result.times.inputs <= result.times.busy).all()
    assert (result.times.busy <= result.times.steps).all()


def test_a_stream_s_next_batch_is_requested_during_a_step(marks, monkeypatch):
    monkeypatch.setattr(step_timer, "COST_SHARE", 1.0)  # mark every step, however short
    made: list[tuple[str, float]] = []
    train(made, streams=True, calls=2)
    assert 2 * STEPS + 1 <= len(made)  # tf.data makes one more in advance
    begun = [moment for what, moment in marks if what == "begin"]
    firsts = begun[:STEPS] + begun[STEPS + 1 : -1]  # each call's last one only ends its last step
    assert all(moment < begin for (_, moment), begin in zip(made, firsts, strict=False))
    step = ["begin", "batch", "computed", "asks", "batch"]
    assert [*step * STEPS, "begin"] * 2 == [what for what, _ in marks]


def test_waiting_for_the_next_batch_counts_as_input(marks):
    times = train([], streams=True, slow_s=0.05).times
    assert STEPS == len(times.steps)
    assert (times.inputs[1:] > 0.03).all()  # the first two were made while the step was traced
    assert (times.inputs <= times.busy).all()
    assert (times.busy <= times.steps).all()


def test_of_short_steps_a_sample_is_marked(marks, monkeypatch):
    """From the second call on; a step more is marked to know when the sampled one ended."""
    monkeypatch.setattr(step_timer, "COST_SHARE", 1e-12)
    assert 1 == len(train([], calls=2).times.steps)
    assert ["begin", "batch", "computed", "begin", "begin"] == [what for what, _ in marks[4 * 3 + 1 :]]


@pytest.mark.parametrize(("device", "works"), [("CPU:0", True), ("GPU:0", False), ("TPU:0", False)])
def test_only_a_cpu_knows_when_a_step_is_done(device, works):
    extended = SimpleNamespace(worker_devices=(f"/job:worker/replica:0/task:1/device:{device}",))
    watch = step_timer.StepTimer(SimpleNamespace(extended=extended))
    assert works == watch.works
    if not works:
        assert () == watch.begin(tf.constant(0), tf.constant(1))
        assert watch.take(5, 1.0) is None


def where(positions: Positions) -> tuple[Place, int, bool]:
    now = positions.current()
    return now.place, now.step, now.left


def test_the_position_shows_while_the_steps_run():
    positions, reached, resume = Positions(), threading.Event(), threading.Event()

    def pause(number: np.ndarray) -> np.ndarray:
        if number == 3:
            reached.set()
            assert resume.wait(60)
        return number

    @tf.function(autograph=False)
    def loop(count: tf.Tensor) -> tf.Tensor:
        def step(done: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
            positions.set(Place.EXCHANGE, done, left=True)
            computed = tf.ensure_shape(tf.numpy_function(pause, [done], tf.int64), [])
            positions.set(Place.EXCHANGE, done + 1, computed)
            return total + computed

        return steps.repeat(count, step, tf.constant(0, tf.int64))

    assert Place.START == positions.current().place
    with ThreadPoolExecutor() as pool:
        call = pool.submit(lambda: loop(tf.constant(9, tf.int64)).numpy())
        assert reached.wait(60)
        try:
            wait_for(lambda: where(positions) == (Place.EXCHANGE, 3, True), "the position", 60)
            wait_for(lambda: positions.current().seconds > 0, "the time at a place", 60)
        finally:
            resume.set()
        assert 36 == call.result()
    assert (Place.EXCHANGE, 9, False) == where(positions)
    positions.set(Place.RESULTS, 9, left=True)
    assert (Place.RESULTS, 9, True) == where(positions)
