"""The position of a task in its steps, which another thread reads while a call of the inner loop runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from cluster.contract.run.records import Place
from tests.support.waiting import wait_for
from train.loops import steps
from train.telemetry.positions import Positions


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
