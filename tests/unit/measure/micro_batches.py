"""What training in micro-batches gives on 1, 2 and 3 replicas: `python -m ... RESULT 3`."""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.unit.measure.replicas import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    OBJECTIVE,
    SEED,
    new_model,
    per_replica,
    prepare,
    strategy_called,
)

# isort: split
import keras
import numpy as np
import tensorflow as tf

from tests.unit.measure.small_training import CLIPPED, training
from train import patches
from train.data import memory, sources
from train.data.batches import Batch, BatchSlice, Replicas
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import optimizers
from train.patches.exact_order import keep_order_of_sums

WIDE, ROWS = 512, 384
"""Of a model whose activations are most of its memory."""


def whole_model() -> keras.Model:
    """Return a model whose layers depend on the micro-batch."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    hidden = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])


def trained(where: str, source: sources.Source, micro_batches: int, *precision: str, **how: Any) -> dict[str, Any]:
    """Train the small model with clipping and regularization; return the results."""
    return training(where, source, CLIPPED, *precision, micro_batches=micro_batches, **how).trained()


def calculated(source: sources.Source, micro_batches: int) -> list[float]:
    """Return one step's gradient of the first kernel as the documentation says it is added up, in plain TensorFlow."""
    model = new_model(0.0)
    examples = memory.load(source.arrays.train)
    at_B = memory.train_indices(0, 0, BatchSlice(GLOBAL_BATCH, SEED), 40)
    kernel = model.trainable_variables[0].value

    @tf.function(autograph=False)
    def gradient(features_BF: tf.Tensor, labels_B: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses_B = OBJECTIVE.loss(labels_B, model(features_BF, training=True))
            loss = tf.nn.compute_average_loss(losses_B, global_batch_size=GLOBAL_BATCH)
        return tape.gradient(loss, kernel)

    total = tf.zeros(kernel.shape)
    for part in np.split(at_B.numpy(), micro_batches):
        total += gradient(tf.gather(examples.features, part), tf.gather(examples.labels, part))
    return total.numpy().ravel().tolist()


def accumulated(source: sources.Source, micro_batches: int) -> list[float]:
    """Return the same gradient as the training has it: the weights' change at a learning rate of 1, and no clipping."""
    strategy = strategy_called("one")
    model = new_model(0.0)
    before = model.trainable_variables[0].numpy()
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)
    kept: list[tf.Variable] = [tf.Variable(tf.zeros(before.shape))]

    class Keeping(TrainStep):
        def update(self, computed: Any) -> tf.Tensor:
            kept[0].assign(computed.gradients[0])
            return super().update(computed)

    train_step = Keeping(
        model, optimizers.GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, 1, micro_batches=micro_batches
    )
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED, None, micro_batches)
    steps.SynchronousSteps(strategy, train_step, feed, 1)(0, 1, False)
    return kept[0].numpy().ravel().tolist()


def dropped() -> list[list[float]]:
    """Return the losses of the same example by replica, at the micro-batches 0 and 1 and without one."""
    strategy = strategy_called("mirrored-3")
    with strategy.scope():
        keras.utils.set_random_seed(SEED)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, optimizers.GradientPolicy(optimizer), OBJECTIVE, 3, 3)
    batch = Batch(tf.ones([1, 32]), tf.zeros([1], tf.int64), tf.ones([1]))
    numbers = [None if number is None else tf.constant(number, tf.int64) for number in (0, 1, None)]
    return [
        per_replica(strategy, lambda replica, step, m=m: train_step.compute(lambda _: batch, step, replica, m).loss)(5)
        for m in numbers
    ]


def largest_temporary(micro_batches: int) -> int:
    """Return the bytes of the largest activation in the graph of a step, and so of what memory holds of each layer."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(WIDE, "relu") for _ in range(3))])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, optimizers.GradientPolicy(optimizer), OBJECTIVE, ROWS, 1, micro_batches=micro_batches)
    strategy = strategy_called("one")
    examples = memory.Examples(tf.ones([ROWS, 8]), tf.zeros([ROWS], tf.int64), None)

    def batch(_given: Any, step: tf.Tensor, part: tf.Tensor) -> Batch:
        return memory.train_batch(examples, step, part, BatchSlice(ROWS, SEED, replicas=Replicas(micro_batches)))

    made: list[int] = []
    compute = TrainStep.compute

    def watched(*args: Any) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        computed = compute(*args)
        weights = {tuple(weight.shape) for weight in train_step.weights}
        for operation in tf.compat.v1.get_default_graph().get_operations()[before:]:
            made.extend(
                output.shape.num_elements() * output.dtype.size
                for output in operation.outputs
                if output.shape.is_fully_defined() and tuple(output.shape) not in weights
            )
        return computed

    TrainStep.compute = watched  # type: ignore[method-assign]
    try:
        steps.SynchronousSteps(strategy, train_step, sources.Feed(lambda: (), batch), 1)(0, 1, False)
    finally:
        TrainStep.compute = compute  # type: ignore[method-assign]
    return max(made)


def main(result: Path) -> None:
    """Measure."""
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    keep_order_of_sums(2, deterministic=True)
    with tempfile.TemporaryDirectory() as folder:
        found = prepare(Path(folder))
        source = found["own:weighted"]
        read = dataclasses.replace(source, arrays=None)
        measured: dict[str, Any] = {
            "one": {m: trained("one", source, m) for m in (1, 4, 12)},
            "read": trained("one", read, 4),
            "mirrored-3": {m: trained("mirrored-3", source, m) for m in (1, 2)},
            "mirrored-3, read": trained("mirrored-3", read, 2),
            "fp16": trained("one", source, 4, "fp16"),
            "elastic": {w: trained(w, source, 3, elastic=True, model_of=whole_model) for w in ("one", "mirrored-3")},
            "elastic, 3": trained("one", source, 3, elastic=True),
            "whole": trained("mirrored-3", source, 2, model_of=whole_model),
            "calculated": calculated(found["own:plain"], 4),
            "accumulated": accumulated(found["own:plain"], 4),
            "dropped": dropped(),
            "largest": {m: largest_temporary(m) for m in (1, 4)},
        }
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
