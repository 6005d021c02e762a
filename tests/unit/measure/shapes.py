"""What a TPU would be given, as far as a CPU can show it: no TPU, static shapes, a step that XLA compiles, bfloat16."""

import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cluster.contract import compatibility, spec
from cluster.system.errors import ClusterError
from train import strategy as strategies


def without_a_tpu() -> dict[str, Any]:
    """Return the error of building the strategy of a missing TPU, and the time it takes."""
    began = time.monotonic()
    try:
        strategies.build(spec.build(workers=0, devices=8, strategy="tpu"), strategies.configure_devices(2))
    except ClusterError as error:
        return {"error": type(error).__name__, "words": str(error), "seconds": time.monotonic() - began}
    return {"error": ""}


NO_TPU = without_a_tpu()  # before anything else of TensorFlow, as in a task

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from train import patches  # noqa: E402
from train.config import TrainConfig  # noqa: E402
from train.data import (  # noqa: E402
    arrays,
    sources,
)
from train.data.batches import Batch, BatchSlice  # noqa: E402
from train.loops import steps  # noqa: E402
from train.loops.train_step import Computed, TrainStep  # noqa: E402
from train.model import models, objectives  # noqa: E402
from train.model.gradients import GradientPolicy  # noqa: E402

GLOBAL_BATCH, REPLICAS = 8, 2
OBJECTIVE = objectives.build("sparse_categorical_crossentropy", classifies=True)


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


def prepare(data_dir: Path) -> sources.Source:
    """Write a few images and return them, to be read by a dataset: what a TPU is fed from."""
    random = np.random.default_rng(0)
    examples = (random.integers(0, 256, (32, 12, 12, 1), dtype=np.uint8), random.integers(0, 10, 32))
    scratch, splits = data_dir / "scratch", {"train": examples, "test": examples}
    scratch.mkdir()
    arrays.write(scratch, data_dir, "own:images", "1", classes=(), splits=splits, source="", source_files={})
    return dataclasses.replace(sources.find(TrainConfig(dataset="own:images"), data_dir), arrays=None)


def new_step(strategy: tf.distribute.Strategy, kind: type[TrainStep] = TrainStep) -> TrainStep:
    """Return the usual model and optimizer."""
    with strategy.scope():
        model = models.build("two_conv_cnn", (12, 12, 1), 10)
        optimizer = keras.optimizers.Adam(0.001)
        optimizer.build(model.trainable_variables)
    return kind(model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, strategy.num_replicas_in_sync)


def shapes(source: sources.Source) -> dict[str, Any]:
    """Return the shapes of what the updates of two replicas work on, and of what evaluation does."""
    strategy = tf.distribute.MirroredStrategy([f"/CPU:{index}" for index in range(REPLICAS)])
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, 7)
    losses = steps.SynchronousSteps(strategy, new_step(strategy, Watched), feed, 2)(0, 2, False).losses
    evaluation: list[list[int | None]] = []

    @tf.function
    def evaluate() -> Any:
        def replica(batch: Batch) -> tf.Tensor:
            evaluation.extend(one.shape.as_list() for one in batch)
            return batch.weights

        return strategy.run(replica, args=(eval_feed.next(),))

    eval_feed = sources.eval_feed(strategy, source, 5)
    evaluate()
    return {"given": given, "made": len(made), "dynamic": dynamic, "losses": losses.tolist(), "evaluation": evaluation}


def updated(train_step: TrainStep, batch: Batch, step: tf.Tensor) -> tf.Tensor:
    """Do a step on one replica; return its loss and score."""
    return train_step.update(train_step.compute(lambda _: batch, step, tf.zeros([], tf.int64)))


def compiled(source: sources.Source) -> dict[str, Any]:
    """Return the losses of some updates as they are, and compiled whole by XLA."""
    batch = next(iter(source.train_dataset(BatchSlice(GLOBAL_BATCH, 7))))
    found: dict[str, Any] = {}
    for name, jit in (("plain", False), ("xla", True)):
        keras.utils.set_random_seed(7)
        train_step = new_step(tf.distribute.get_strategy())
        update = tf.function(functools.partial(updated, train_step), jit_compile=jit)
        found[name] = [float(update(batch, tf.constant(step, tf.int64))[0, 0]) for step in range(3)]
        found[f"{name} iterations"] = int(train_step.policy.optimizer.iterations.numpy())
    return found


def in_bfloat16(source: sources.Source) -> dict[str, Any]:
    """Return the types in which a TPU's model keeps its weights, computes, and gives its logits."""
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    with strategies.policy(compatibility.precision_of("tpu", "fp32")):
        train_step = new_step(strategy)
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, 7)
    losses = steps.SynchronousSteps(strategy, train_step, feed, 2)(0, 2, False).losses
    found = {
        "computes": sorted({layer.compute_dtype for layer in train_step.model.layers if layer.weights}),
        "variables": sorted({keras.backend.standardize_dtype(one.dtype) for one in train_step.model.variables}),
        "optimizer": sorted(
            {keras.backend.standardize_dtype(one.dtype) for one in train_step.policy.optimizer.variables}
        ),
        "logits": train_step.model(tf.zeros([1, 12, 12, 1])).dtype.name,
        "losses": losses.tolist(),
    }
    return {**found, "elsewhere": keras.mixed_precision.global_policy().name}


def main(result: Path) -> None:
    """Measure."""
    patches.apply()
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(Path(folder))
        found = {"shapes": shapes(source), "compiled": compiled(source), "bfloat16": in_bfloat16(source)}
    result.write_text(json.dumps({"no_tpu": NO_TPU, **found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
