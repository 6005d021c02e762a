"""What training on 4 virtual shards gives on 1, 2 and 3 replicas, bit for bit: `python -m ... RESULT 3 [all]`."""

import dataclasses
import hashlib
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
    per_replica,
    prepare,
    strategy_called,
)

# isort: split
import keras
import numpy as np
import tensorflow as tf

from train import patches
from train.data import sources
from train.elastic.exact_sum import exact_sum
from train.elastic.train_step import ElasticTrainStep
from train.elastic.virtual_shards import VirtualShards
from train.loops import outer, steps
from train.loops.train_step import TrainStep
from train.model.gradients import GradientPolicy

SHARDS, STEPS = 4, 6
WHERES = ("one", "central-2", "mirrored-3")
"""1 replica with 4 shards; 2 with 2; 3, of which one has 2."""
TRAINED = {"plain": ("one",), "whole": WHERES, "read": ("mirrored-3",)}
"""Where each kind is trained, unless all are asked for."""


class Counting(keras.layers.Layer):
    """Counts its calls in whole numbers and in fractions, and keeps a number that never changes."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.fixed = self.add_weight(shape=(2,), initializer=lambda *_, **__: [1e30, 1.1], trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


def new_model(kind: str) -> keras.Model:
    """Return a model whose weights are always the same: `plain`, or with all that replicas would disagree on."""
    keras.utils.set_random_seed(SEED)
    layers, l2 = keras.layers, keras.regularizers.L2(0.05)
    more = [layers.BatchNormalization(momentum=0.5), Counting(), layers.Dropout(0.5)] if kind == "whole" else []
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=l2)
    return keras.Sequential([keras.Input((FEATURES,)), hidden, *more, layers.Dense(CLASSES)])


def trained(where: str, kind: str, source: sources.Source, virtual: bool = True) -> dict[str, Any]:
    """Train for some steps; return the losses and scores, and hashes of all that was trained."""
    strategy = strategy_called(where)
    with strategy.scope():
        model = new_model(kind)
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    replicas = strategy.num_replicas_in_sync
    what = (model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH)
    shards = VirtualShards(SHARDS, replicas)
    train_step = ElasticTrainStep(*what, SHARDS, shards=shards) if virtual else TrainStep(*what, replicas)
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED, shards if virtual else None)
    result = steps.SynchronousSteps(strategy, train_step, feed, STEPS)(0, STEPS, False)
    fixed = model.non_trainable_variables
    others = [np.ascontiguousarray(variable.numpy()).tobytes() for variable in [*fixed, *optimizer.variables]]
    return {
        "losses": result.losses.tolist(),
        "scores": result.scores.tolist(),
        "weights": [variable.numpy().tolist() for variable in model.trainable_variables],
        "weights_sha256": outer.weights_sha256(model),
        "others_sha256": hashlib.sha256(b"".join(others)).hexdigest(),
        "averages": [v.numpy().tolist() for v in fixed if "moving" in v.path],
        "fixed": [v.numpy().tolist() for v in fixed if v.shape == (2,) and v.dtype == "float32"],
    }


def summed(where: str, numbers_VN: np.ndarray) -> list[str]:
    """Return the exact sum of shards that lie on the replicas of a strategy, as hexadecimal float64."""
    strategy = strategy_called(where)
    shards = VirtualShards(len(numbers_VN), strategy.num_replicas_in_sync)

    def replica(number: tf.Tensor, _step: tf.Tensor) -> tf.Tensor:
        own_nN = tf.ensure_shape(tf.gather(tf.constant(numbers_VN), shards.of(number)), [None, numbers_VN.shape[1]])
        return exact_sum([own_nN], shards.total)[0]

    return [value.hex() for value in per_replica(strategy, replica)(0)[0]]


def main(result: Path, everywhere: bool) -> None:
    """Measure."""
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    random = np.random.default_rng(1)
    numbers_VN = (random.normal(size=(7, 50)) * 10.0 ** random.integers(-12, 12, (7, 50))).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        found = prepare(Path(folder))
        kinds = {
            "plain": ("plain", found["own:plain"]),
            "whole": ("whole", found["own:weighted"]),
            "read": ("whole", dataclasses.replace(found["own:weighted"], arrays=None)),
        }
        measured: dict[str, Any] = {
            kind: {where: trained(where, *requested) for where in (WHERES if everywhere else TRAINED[kind])}
            for kind, requested in kinds.items()
        }
        measured["plain"]["without"] = trained("one", *kinds["plain"], virtual=False)
    measured["sums"] = {where: summed(where, numbers_VN) for where in WHERES} | {"numbers": numbers_VN.tolist()}
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "all" in sys.argv[3:])
