"""What training and evaluation compute on one device, on 2 or on 3 replicas, and in plain TensorFlow.

One process can have collectives over 2 devices or over 3, not both: `python -m ... RESULT 2`, `... RESULT 3`.
"""

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from train import strategy as strategies

DEVICES = int(sys.argv[2])
strategies.configure_devices(DEVICES)  # before anything else of TensorFlow

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from train import patches  # noqa: E402
from train.config import TrainConfig  # noqa: E402
from train.data import (  # noqa: E402
    arrays,
    memory,
    sources,
)
from train.data.batches import Batch, BatchSlice  # noqa: E402
from train.data.prepare import sharding  # noqa: E402
from train.loops import steps  # noqa: E402
from train.loops.train_step import TrainStep  # noqa: E402
from train.model import objectives  # noqa: E402
from train.model.gradients import GradientPolicy  # noqa: E402
from train.patches import batch_normalization, placed_seeds  # noqa: E402

SEED, GLOBAL_BATCH, STEPS, RATE = 7, 12, 3, 0.1
NUM_TRAIN, NUM_TEST = 40, 1003  # neither a multiple of the global batch
FEATURES, CLASSES = 6, 3
NO, YES = False, True
SIGNALS = ((NO, NO, NO), (NO, YES, NO), (YES, NO, YES), (NO, NO, YES), (YES, YES, YES))
WHERES = ("one", "mirrored-2", "central-2") if DEVICES == 2 else ("mirrored-3",)
OBJECTIVE = objectives.build("sparse_categorical_crossentropy", classifies=True)


@functools.cache  # the collectives of two strategies over the same devices would meet each other
def strategy_called(name: str) -> tf.distribute.Strategy:
    """Return a strategy by a name such as `mirrored-2`."""
    kind, _, count = name.partition("-")
    devices = [f"/CPU:{index}" for index in range(int(count or 1))]
    if kind == "one":
        return tf.distribute.OneDeviceStrategy(devices[0])
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    return tf.distribute.experimental.CentralStorageStrategy(devices)


# Data


def prepare(data_dir: Path) -> dict[str, sources.Source]:
    """Write random examples, with and without weights, as arrays and as shards; return them."""
    random = np.random.default_rng(0)
    features = random.normal(size=(NUM_TRAIN + NUM_TEST, FEATURES)).astype(np.float32)
    labels = random.integers(0, CLASSES, NUM_TRAIN + NUM_TEST)
    labels[-1] = np.argmax(new_model(0)(features[-1:]))  # what evaluation is padded with would count
    weights = random.uniform(0, 3, NUM_TRAIN + NUM_TEST).astype(np.float32)
    weights[:5] = 0
    found = {}
    for name, parts in {"own:plain": (features, labels), "own:weighted": (features, labels, weights)}.items():
        (data_dir / "scratch").mkdir(parents=True, exist_ok=True)
        splits = {"train": tuple(x[:NUM_TRAIN] for x in parts), "test": tuple(x[NUM_TRAIN:] for x in parts)}
        arrays.write(data_dir / "scratch", data_dir, name, "1", classes=(), splits=splits, source="", source_files={})
        found[name] = sources.find(TrainConfig(dataset=name), data_dir)

    class Numbers:
        """Example i has the features i and the label i."""

        version, classes = "1", ()

        def open(self) -> dict[str, int]:
            return {"train": NUM_TRAIN, "test": 5}

        def examples(self, split: str) -> Any:
            return ((np.full(FEATURES, i, np.float32), i) for i in range(self.open()[split]))

    sharding.shard("numbers", data_dir, num_shards=4, open_source=lambda *_: Numbers())
    found["numbers"] = sources.find(TrainConfig(dataset="numbers", source="stream"), data_dir)
    return found


# Loss arithmetic


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
    """Return the weights, end to end."""
    return np.concatenate([variable.numpy().reshape(-1) for variable in model.trainable_variables]).tolist()


def trained(name: str, source: sources.Source, l2: float) -> dict[str, Any]:
    """Train for a few steps; return every step's loss and score and the last weights."""
    strategy = strategy_called(name)
    with strategy.scope():
        model = new_model(l2)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    replicas = strategy.num_replicas_in_sync
    train_step = TrainStep(model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, replicas)
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED)
    result = steps.SynchronousSteps(strategy, train_step, feed, STEPS)(0, STEPS, False)
    return {"losses": result.losses.tolist(), "scores": result.scores.tolist(), "weights": weights_of(model)}


def signalled(name: str, source: sources.Source) -> dict[str, list[list[Any]]]:
    """Return the signals if this task requests nothing, a checkpoint, an end, and both: from steps and by agreement.

    Every replica of the task says what it wants, so that several of them come back added up.
    """
    strategy = strategy_called(name)
    with strategy.scope():
        model = new_model(0)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, strategy.num_replicas_in_sync)
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED)
    expected = [steps.Signals(*signals) for signals in SIGNALS]
    due = iter(SIGNALS)
    run = steps.SynchronousSteps(strategy, train_step, feed, STEPS, lambda stop, _: steps.Signals(stop, *next(due)[1:]))
    agree = steps.agreement(strategy)
    return {
        "steps": [dataclasses.astuple(run(step, 1, one.stop).signals) for step, one in enumerate(expected)],
        "asking": [dataclasses.astuple(agree(one)) for one in expected],
        "gathered": [steps.gathering(strategy)(number) for number in (-1, 2**40)],
    }


def calculated(source: sources.Source, l2: float) -> dict[str, Any]:
    """Return the same, calculated without any of our steps: sum(weight * loss) / batch + l2 * sum(weights ** 2)."""
    model = new_model(l2)
    examples = memory.load(source.arrays.train)
    weights_N = tf.ones([NUM_TRAIN]) if examples.weights is None else examples.weights
    losses, scores = [], []
    for step in range(STEPS):
        at_B = memory.train_indices(step, 0, BatchSlice(GLOBAL_BATCH, SEED), NUM_TRAIN)
        labels_B = tf.gather(examples.labels, at_B)
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            logits_BK = model(tf.gather(examples.features, at_B))
            chosen_B = tf.gather(tf.nn.log_softmax(logits_BK), labels_B, batch_dims=1)
            loss = -tf.reduce_sum(tf.gather(weights_N, at_B) * chosen_B) / GLOBAL_BATCH
            if l2:  # the second kernel and bias, and the first kernel
                loss += l2 * tf.add_n([tf.reduce_sum(variables[at] ** 2) for at in (0, 2, 3)])
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
        right = np.mean(np.argmax(logits_BK, -1) == labels_B.numpy())
        losses.append(float(loss))
        scores.append(float(right))
    return {"losses": losses, "scores": scores, "weights": weights_of(model)}


def arithmetic(found: dict[str, sources.Source]) -> dict[str, Any]:
    """Return the numbers of all trainings, by case and by where they were computed."""
    cases = {"plain": ("own:plain", 0.0), "regularised": ("own:plain", 0.05), "weighted": ("own:weighted", 0.0)}
    numbers: dict[str, Any] = {
        case: {where: trained(where, found[dataset], l2) for where in WHERES} for case, (dataset, l2) in cases.items()
    }
    if DEVICES == 2:
        for case, (dataset, l2) in cases.items():
            numbers[case]["calculated"] = calculated(found[dataset], l2)
    return numbers


def evaluated(found: dict[str, sources.Source]) -> dict[str, Any]:
    """Return the results on all of the test split, which has weights that must not matter, at any replica count."""
    source = found["own:weighted"]
    examples = memory.load(source.arrays.test)
    model = new_model(0)
    logits_NK = model(examples.features)
    losses_N = tf.nn.sparse_softmax_cross_entropy_with_logits(examples.labels, logits_NK)
    results: dict[str, Any] = {
        "right": int(np.sum(np.argmax(logits_NK, -1) == examples.labels.numpy())),
        "mean_loss": float(tf.reduce_mean(tf.cast(losses_N, tf.float64))),
        "examples": NUM_TEST,
    }
    for where in ("alone", *WHERES):
        strategy = None if where == "alone" else strategy_called(where)
        with strategy.scope() if strategy else tf.device(None):
            model = new_model(0)
        for kind, of in (("gathered", source), ("read", dataclasses.replace(source, arrays=None))):
            feed = sources.eval_feed(strategy, of, 100)
            evaluate = steps.evaluation(strategy, model, OBJECTIVE, feed, num_examples=NUM_TEST, batch=100)
            results[f"{where}, {kind}"] = [evaluate(), evaluate()]
    return results


# Guards


def per_replica(strategy: tf.distribute.Strategy, function: Callable[..., tf.Tensor]) -> Callable[[int], list[Any]]:
    """Return a function that does a step and returns all replicas' results; `function` takes replica and step."""

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


def counters() -> dict[str, Any]:
    """Return a metric's and an optimizer's counts under CentralStorageStrategy: 3 steps, examples of 1 and 3."""
    strategy = strategy_called("central-2")
    with strategy.scope():
        mean = keras.metrics.Mean()
        model = new_model(0)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)

    def count(replica: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        mean.update_state(1 + 2 * tf.cast(replica, tf.float32))
        gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        return step

    run = per_replica(strategy, count)
    for step in range(3):
        run(step)
    return {
        "total": float(mean.total.numpy()),
        "count": float(mean.count.numpy()),
        "iterations": int(optimizer.iterations.numpy()),
    }


class Block(keras.layers.Layer):
    """Has a BatchNormalization inside, as blocks of a residual network have."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = keras.layers.BatchNormalization(momentum=0.5)

    def build(self, shape: tuple[int, ...]) -> None:
        self.normal.build(shape)
        self.built = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.normal(inputs, training=training)


def normalized(name: str, guarded: bool, found: dict[str, sources.Source]) -> dict[str, Any]:
    """Return the moving averages of BatchNormalization layers on the surface, in a model and in a layer."""
    strategy, source = strategy_called(name), found["own:plain"]
    with strategy.scope():
        keras.utils.set_random_seed(SEED)
        layers = keras.layers
        inner = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.5)])
        model = keras.Sequential(
            [keras.Input((FEATURES,)), layers.BatchNormalization(momentum=0.5), layers.Dense(4), inner, Block()]
        )
        changed = (
            batch_normalization.synchronize_batch_normalization(model, strategy.num_replicas_in_sync) if guarded else 0
        )
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, strategy.num_replicas_in_sync)
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED)
    result = steps.SynchronousSteps(strategy, train_step, feed, STEPS)(0, STEPS, False)
    averages = [variable.numpy().tolist() for variable in model.non_trainable_variables]
    return {"changed": changed, "averages": averages, "losses": result.losses.tolist()}


def normalized_by_mask(name: str) -> list[Any]:
    """Return what BatchNormalization makes of four examples, the first of which have less padding, and gradients."""
    strategy = strategy_called(name)
    replicas, random = strategy.num_replicas_in_sync, np.random.default_rng(SEED)
    values, weights = (random.normal(size=(replicas, 4 // replicas, 3, 2)).astype(np.float32) for _ in range(2))
    masks = (np.arange(3) < np.array([[3], [3], [2], [1]])).reshape(replicas, 4 // replicas, 3)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer.build((None, 3, 2))

    def normalize(replica: tf.Tensor, _step: tf.Tensor) -> tf.Tensor:
        own = tf.constant(values)[replica]
        with tf.GradientTape() as tape, keras.StatelessScope():
            tape.watch(own)
            outputs = layer(own, training=True, mask=tf.constant(masks)[replica])
            loss = tf.reduce_sum(tf.square(outputs) * tf.constant(weights)[replica])
        return tf.stack([outputs, tape.gradient(loss, own)], 1)

    return [example for of_replica in per_replica(strategy, normalize)(0) for example in of_replica]


def dropped(name: str) -> dict[str, Any]:
    """Return which units Dropout keeps, by step and replica, and the state of its generator before and after.

    At the steps 0, 1 and 0 again; of two layers, the second called twice.
    """
    strategy = strategy_called(name)
    with strategy.scope():
        first, second = (keras.layers.Dropout(0.5, seed=seed) for seed in (1, 2))
    ones = tf.ones([1, 32])
    state = [layer.seed_generator.state.numpy().tolist() for layer in (first, second)]

    def draw(replica: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        with placed_seeds.random_place(step, replica):
            return tf.concat([layer(ones, training=True) for layer in (first, second, second)], 0) > 0

    run = per_replica(strategy, draw)
    try:
        kept = [run(step) for step in (0, 1, 0)]
    except ValueError as error:
        return {"error": str(error)}
    after = [layer.seed_generator.state.numpy().tolist() for layer in (first, second)]
    return {"kept": kept, "state": state, "state_after": after}


def step_dropped() -> list[list[float]]:
    """Return the loss of two replicas that see the same example with dropout, at the steps 5, 6 and 5 again."""
    strategy = strategy_called("mirrored-2")
    with strategy.scope():
        keras.utils.set_random_seed(SEED)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, GradientPolicy(optimizer), OBJECTIVE, 2, 2)
    batch = Batch(tf.ones([1, 32]), tf.zeros([1], tf.int64), tf.ones([1]))

    run = per_replica(
        strategy, lambda replica, step: train_step.update(train_step.compute(lambda _: batch, step, replica))[0, 0]
    )
    return [run(step) for step in (5, 6, 5)]


# Feeds


def labels_of(strategy: tf.distribute.Strategy, feed: sources.Feed) -> list[list[list[int]]]:
    """Return the labels that each replica is fed at the steps 1, 2 and 3."""

    @tf.function
    def batch(step: tf.Tensor) -> Any:
        def replica(given: Any) -> tf.Tensor:
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
            return feed.batch(given, step, number).labels

        return strategy.run(replica, args=(feed.next(),))

    batches = [strategy.experimental_local_results(batch(tf.constant(step, tf.int64))) for step in (1, 2, 3)]
    return [[labels_B.numpy().tolist() for labels_B in of_step] for of_step in batches]


def fed(found: dict[str, sources.Source]) -> dict[str, Any]:
    """Return the labels that each of two replicas gets at three steps, from the second on, and what one would get."""
    results: dict[str, Any] = {}
    kinds = {
        "arrays": found["own:plain"],
        "dataset": dataclasses.replace(found["own:plain"], arrays=None),
        "shards": found["numbers"],
    }
    for kind, source in kinds.items():
        for where in ("one", "mirrored-2"):
            strategy = strategy_called(where)
            feed = sources.train_feed(strategy, source, 1, GLOBAL_BATCH, SEED)

            results[f"{kind}, {where}"] = labels_of(strategy, feed)
    one = strategy_called("one")
    whole = sources.train_feed(one, found["numbers"], 0, GLOBAL_BATCH, SEED)
    results["shards, one, from the beginning"] = labels_of(one, whole)
    return results


def guarded(found: dict[str, sources.Source]) -> dict[str, Any]:
    """Measure without patches, then apply them and measure again."""
    traps = {
        "counters": counters(),
        "dropout": {name: dropped(name) for name in ("mirrored-2", "central-2")},
        "normalized": {name: normalized(name, False, found) for name in ("mirrored-2", "central-2")},
        "by_mask": {name: normalized_by_mask(name) for name in ("mirrored-2", "central-2")},
    }
    patches.apply()
    held = {
        "counters": counters(),
        "dropout": {name: dropped(name) for name in ("one", "mirrored-2", "central-2")},
        "normalized": {name: normalized(name, True, found) for name in ("one", "mirrored-2", "central-2")},
        "by_mask": {name: normalized_by_mask(name) for name in ("one", "mirrored-2", "central-2")},
        "step_dropout": step_dropped(),
    }
    return {"traps": traps, "held": held}


def main(result: Path) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory() as folder:
        found = prepare(Path(folder))
        measured = guarded(found) | {"fed": fed(found)} if DEVICES == 2 else {}
        measured |= {"arithmetic": arithmetic(found), "evaluated": evaluated(found)}
        measured |= {"signals": {where: signalled(where, found["own:plain"]) for where in WHERES}}
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
