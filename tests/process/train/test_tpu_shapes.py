"""What TPUs require, as far as a machine without one can show it: static shapes and XLA."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.contract import spec
from cluster.system.errors import PrerequisiteError
from train import patches
from train import strategy as strategies
from train.config import TrainConfig
from train.data import feeds, opening
from train.data.batches import BatchSlice
from train.data.prepare.preparation import write_arrays
from train.data.sources import Source
from train.loops import steps
from train.loops.train_step import Computed, TrainStep
from train.model import models, objectives
from train.model.gradients import GradientPolicy

DEVICES = 2
GLOBAL_BATCH, REPLICAS = 8, 2
OBJECTIVE = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)


class Watched(TrainStep):
    """A step that keeps the shape of every tensor that it is given and makes."""

    def compute(self, batch_of: Any, step: tf.Tensor, replica: tf.Tensor, micro_batch: Any = None) -> Computed:
        batch = batch_of(replica)
        given.extend([one.shape.as_list() if one.shape.rank is not None else None for one in (*batch, step, replica)])
        return self._watched(lambda: super(Watched, self).compute(batch_of, step, replica, micro_batch))

    def update(self, computed: Computed) -> tf.Tensor:
        return self._watched(lambda: super(Watched, self).update(computed))

    def _watched(self, call: Callable[[], Any]) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        result = call()
        for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
            for output in operation.outputs:
                made.append(output.name)
                if not output.shape.is_fully_defined():
                    dynamic.append(f"{operation.type} {output.name} {output.shape}")
        return result


given: list[list[int | None] | None] = []
made: list[str] = []
dynamic: list[str] = []


def new_step(strategy: tf.distribute.Strategy, kind: type[TrainStep] = TrainStep) -> TrainStep:
    with strategy.scope():
        model = models.build_by_name("two_conv_cnn", (12, 12, 1), 10)
        optimizer = keras.optimizers.Adam(0.001)
        optimizer.build(model.trainable_variables)
    return kind(model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, strategy.num_replicas_in_sync)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    """A few images, read by a dataset: what a TPU is fed from."""
    patches.apply()
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    examples = (random.integers(0, 256, (32, 12, 12, 1), dtype=np.uint8), random.integers(0, 10, 32))
    write_arrays(folder, "own:images", "1", {"train": examples, "test": examples})
    return dataclasses.replace(opening.open_source(TrainConfig(dataset="own:images"), folder), in_memory=False)


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"/CPU:{index}" for index in range(REPLICAS)])


def test_a_machine_without_a_tpu_is_reported_at_once():
    """Before anything else of TensorFlow, as in a task."""
    began = time.monotonic()
    with pytest.raises(PrerequisiteError):
        strategies.build_strategy(spec.build(workers=0, devices=8, strategy="tpu"), strategies.configure_devices(2))
    assert time.monotonic() - began < 10


def test_every_shape_that_an_update_sees_or_makes_is_static(source, strategy):
    feed = feeds.train_feed(strategy, source, TrainConfig(global_batch=GLOBAL_BATCH, seed=7))
    losses = steps.SynchronousSteps(strategy, new_step(strategy, Watched), feed, 2)(0, 2).losses
    assert [[4, 12, 12, 1], [4], [4], [], []] == given[:5]  # features, labels, weights, step, replica
    assert {"[4, 12, 12, 1]", "[4]", "[]"} == {str(shape) for shape in given}
    assert len(made) > 100
    assert [] == dynamic
    assert np.isfinite(losses).all()


def test_an_update_can_be_compiled_whole_by_xla(source):
    """Forward, backward, Adam and the counters."""
    batch = next(iter(source.train_dataset(BatchSlice(GLOBAL_BATCH, 7))))

    def train(*, jit: bool) -> list[float]:
        keras.utils.set_random_seed(7)
        train_step = new_step(tf.distribute.get_strategy())

        @tf.function(jit_compile=jit)
        def update(step: tf.Tensor) -> tf.Tensor:
            return train_step.update(train_step.compute(lambda _: batch, step, tf.zeros([], tf.int64)))

        losses = [float(update(tf.constant(step, tf.int64))[0, 0]) for step in range(3)]
        assert 3 == int(train_step.policy.optimizer.iterations.numpy())
        return losses

    plain, xla = train(jit=False), train(jit=True)
    np.testing.assert_allclose(xla, plain, rtol=1e-4)
    assert xla[-1] < xla[0]
