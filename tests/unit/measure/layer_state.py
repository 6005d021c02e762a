"""What training with layers that have state, losses and constraints gives on replicas, and what plain Keras gives.

`python -m ... RESULT 3`.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.measure.replicas import CLASSES, FEATURES, GLOBAL_BATCH, NUM_TRAIN, SEED, prepare

# isort: split
import keras
import tensorflow as tf

from tests.unit.measure.small_training import PLAIN, STEPS, Training, training
from tests.unit.measure.tracking import Tracking
from train import patches, program
from train.data import memory, sources
from train.data.batches import BatchSlice

RATE = PLAIN.learning_rate


class Disagreeing(keras.layers.Layer):
    """Keeps a whole number that depends on the examples."""

    def build(self, _shape: Sequence[int]) -> None:
        self.positive = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="positive")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.positive.assign_add(keras.ops.sum(keras.ops.cast(inputs > 0, "int32")))
        return inputs


class Conditional(keras.layers.Layer):
    """Assigns inside a condition."""

    def build(self, _shape: Sequence[int]) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        tf.cond(tf.reduce_any(inputs > 0), lambda: self.calls._value is None or self.calls.assign(1.0), lambda: 1.0)
        return inputs


def new_model(kind: str) -> keras.Model:
    """Return a model whose weights are always the same."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    hidden = layers.Dense(
        8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.05), kernel_constraint="non_neg"
    )
    more = {
        "tracking": [Tracking()],
        "normalized": [layers.BatchNormalization(momentum=0.5), Tracking()],
        "disagreeing": [Disagreeing()],
        "conditional": [Conditional()],
    }[kind]
    return keras.Sequential([keras.Input((FEATURES,)), hidden, *more, layers.Dense(CLASSES)])


def results(losses: list[float], model: keras.Model) -> dict[str, Any]:
    """Return the losses and all variables, by name."""
    return {
        "losses": losses,
        "variables": {f"{at} {one.name}": one.numpy().tolist() for at, one in enumerate(model.variables)},
    }


def of_keras(kind: str, source: sources.Source) -> dict[str, Any]:
    """Return Keras's results on one device."""
    model = new_model(kind)
    model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    examples = memory.load(source.arrays.train)
    losses = []
    for step in range(STEPS):
        at_B = memory.train_indices(step, 0, BatchSlice(GLOBAL_BATCH, SEED), NUM_TRAIN)
        model.reset_metrics()
        losses.append(float(model.train_on_batch(tf.gather(examples.features, at_B), tf.gather(examples.labels, at_B))))
    return results(losses, model)


def of_ours(kind: str, where: str, source: sources.Source, **how: Any) -> dict[str, Any]:
    """Return the results of our step."""
    found: Training = training(where, source, PLAIN, model_of=lambda: new_model(kind), **how)
    return results(found.trained()["losses"], found.train_step.model)


def refused(kind: str, **how: Any) -> str:
    """Return the class of the error with which a training ends, and its message."""
    try:
        of_ours(kind, **how)
    except Exception as error:
        error = program.explain(error) or error
        return f"{type(error).__name__}: {error}"
    return ""


def main(result: Path) -> None:
    """Measure."""
    tf.config.experimental.enable_op_determinism()
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(Path(folder))["own:plain"]
        measured: dict[str, Any] = {kind: {"keras": of_keras(kind, source)} for kind in ("tracking", "normalized")}
        patches.apply()
        for where in ("one", "mirrored-3", "central-2"):
            measured["normalized"][where] = of_ours("normalized", where, source)
        for where, how in {
            "one": {"micro_batches": 3},
            "mirrored-3": {"micro_batches": 2},
            "central-2": {"micro_batches": 3},
        }.items():
            measured["tracking"][f"{where}, micro-batches"] = of_ours("tracking", where, source, **how)
        for where in ("one", "mirrored-3"):
            measured["tracking"][f"{where}, elastic"] = of_ours("tracking", where, source, elastic=True)
        measured["disagreeing"] = refused("disagreeing", where="mirrored-3", source=source)
        measured["conditional"] = {
            where: refused("conditional", where=where, source=source) for where in ("one", "mirrored-3")
        }
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
