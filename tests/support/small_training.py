"""A small training with any optimizer, precision, micro-batches and virtual shards, for measurements."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from train import strategy as strategies
from train.config import Optimizer, TrainConfig
from train.data import feeds, opening
from train.data.batches import VirtualShards
from train.data.prepare.preparation import write_arrays
from train.data.sources import Source
from train.elastic.shard_step import ElasticTrainStep
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import gradients, objectives, optimizers
from train.patches import batch_normalization

SEED, GLOBAL_BATCH = 7, 12
NUM_TRAIN, NUM_TEST = 40, 1003  # neither a multiple of the global batch
FEATURES, CLASSES = 6, 3
OBJECTIVE = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)


@functools.cache  # collectives of two strategies over the same devices would interfere
def strategy_called(name: str) -> tf.distribute.Strategy:
    """Return a strategy by a name such as `mirrored-2`."""
    kind, _, count = name.partition("-")
    devices = [f"/CPU:{index}" for index in range(int(count or 1))]
    if kind == "one":
        return tf.distribute.OneDeviceStrategy(devices[0])
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if kind == "multiworker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.experimental.CentralStorageStrategy(devices)


def prepare(data_dir: Path) -> Source:
    """Write random examples with weights; return their source."""
    random = np.random.default_rng(0)
    features = random.normal(size=(NUM_TRAIN + NUM_TEST, FEATURES)).astype(np.float32)
    labels = random.integers(0, CLASSES, NUM_TRAIN + NUM_TEST)
    labels[-1] = np.argmax(new_model(0)(features[-1:]))  # the evaluation's padding, which repeats it, would count
    weights = random.uniform(0, 3, NUM_TRAIN + NUM_TEST).astype(np.float32)
    weights[:5] = 0
    parts = (features, labels, weights)
    splits = {"train": tuple(x[:NUM_TRAIN] for x in parts), "test": tuple(x[NUM_TRAIN:] for x in parts)}
    write_arrays(data_dir, "own:weighted", "1", splits)
    return opening.open_source(TrainConfig(dataset="own:weighted"), data_dir)


def new_model(l2: float) -> keras.Model:
    """Return a small model whose weights are always the same."""
    keras.utils.set_random_seed(SEED)
    layers, regularizer = keras.layers, keras.regularizers.L2(l2) if l2 else None
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, activation="tanh", kernel_regularizer=regularizer),
            layers.Dense(CLASSES, kernel_regularizer=regularizer, bias_regularizer=regularizer),
        ]
    )


def weights_of(model: keras.Model) -> list[float]:
    return np.concatenate([variable.numpy().reshape(-1) for variable in model.trainable_variables]).tolist()


def per_replica(strategy: tf.distribute.Strategy, function: Callable[..., tf.Tensor]) -> Callable[[int], list[Any]]:
    """Return a function from a step to the results `function(replica, step)` of all replicas."""

    @tf.function
    def run(step: tf.Tensor) -> Any:
        def replica() -> tf.Tensor:
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
            return function(number, step)

        return strategy.run(replica)

    def do(step: int) -> list[Any]:
        returned = strategy.experimental_local_results(run(tf.constant(step, tf.int64)))
        return [value.numpy().tolist() for value in returned]

    return do


SHARDS, STEPS = 4, 4
PLAIN = Optimizer(name="sgd", learning_rate=0.5, momentum=0.0, warmup_steps=0)
CLIPPED = dataclasses.replace(PLAIN, clip_norm=0.05)
REGULARISED = functools.partial(new_model, 0.05)


@dataclasses.dataclass
class Training:
    train_step: TrainStep
    run: Any

    @property
    def scale(self) -> gradients.LossScale | None:
        return self.train_step.policy.loss_scale

    def trained(self) -> dict[str, Any]:
        result, model = self.run(0, STEPS), self.train_step.model
        return {
            "losses": result.losses.tolist(),
            "weights": weights_of(model),
            "dtypes": sorted({variable.dtype for variable in model.trainable_variables}),
            "computes": sorted({layer.compute_dtype for layer in model.layers}),
        }


def training(
    where: str,
    source: Source,
    optimizer: Optimizer,
    precision: str = "fp32",
    *,
    micro_batches: int = 1,
    elastic: bool = False,
    model_of: Callable[[], keras.Model] = REGULARISED,
    objective: objectives.Objective = OBJECTIVE,
) -> Training:
    """Return a training of a small model, set up as in a run with these settings."""
    strategy = strategy_called(where)
    replicas = strategy.num_replicas_in_sync
    sizes = {"global_batch": GLOBAL_BATCH, "seed": SEED, "micro_batches": micro_batches}
    config = TrainConfig(optimizer=optimizer, precision=precision, **sizes)
    with strategy.scope(), strategies.precision_policy(precision):
        model = model_of()
        batch_normalization.synchronize_batch_normalization(model, 1 if elastic else replicas)
        policy = optimizers.build_policy(config, optimizers.build_for_model(config, model))
    shards = VirtualShards(SHARDS, replicas) if elastic else None
    what = (model, policy, objective, GLOBAL_BATCH)
    train_step = (
        ElasticTrainStep(*what, SHARDS, micro_batches, shards=shards)
        if shards
        else TrainStep(*what, replicas, micro_batches)
    )
    feed = feeds.train_feed(strategy, source, config, cut=shards)
    return Training(train_step, steps.SynchronousSteps(strategy, train_step, feed, STEPS))
