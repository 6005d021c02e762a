"""The numbers of a step, an evaluation and a feed: on replicas those of one device, and those of plain TensorFlow."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.small_training import (
    GLOBAL_BATCH,
    NUM_TEST,
    NUM_TRAIN,
    OBJECTIVE,
    SEED,
    new_model,
    prepare,
    strategy_called,
    weights_of,
)
from train.data import memory, sources
from train.data.batches import BatchSlice
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model.gradients import GradientPolicy

DEVICES = (2, 3)  # a process can have collectives over 2 devices or over 3, not both
STEPS, RATE = 3, 0.1
NO, YES = False, True
SIGNALS = ((NO, NO, NO), (NO, YES, NO), (YES, NO, YES), (NO, NO, YES), (YES, YES, YES))
WHERES = {2: ("one", "mirrored-2", "central-2"), 3: ("mirrored-3",)}[len(tf.config.list_logical_devices("CPU"))]
CASES = {"plain": ("own:plain", 0.0), "regularised": ("own:plain", 0.05), "weighted": ("own:weighted", 0.0)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, sources.Source]:
    return prepare(tmp_path_factory.mktemp("data"))


# Loss arithmetic


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
    result = steps.SynchronousSteps(strategy, train_step, feed, STEPS)(0, STEPS)
    return {
        "losses": result.losses.tolist(),
        "scores": result.values["accuracy"].tolist(),
        "weights": weights_of(model),
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


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("case", CASES)
def test_losses_scores_and_weights_are_those_of_the_whole_batch(prepared, case, where):
    """Regularisation counts once whatever the replicas; weights weigh losses, divided by the batch, not scores."""
    dataset, l2 = CASES[case]
    expected, actual = calculated(prepared[dataset], l2), trained(where, prepared[dataset], l2)
    assert STEPS == len(actual["losses"])
    for name in ("losses", "scores", "weights"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6, atol=1e-6 if name == "weights" else 0)


def test_the_cases_differ(prepared):
    """Else regularisation and the weights of examples would prove nothing above."""
    first, *others = (calculated(prepared[dataset], l2)["losses"][0] for dataset, l2 in CASES.values())
    assert all(abs(first - other) > 0.1 for other in others)


@pytest.mark.parametrize("where", WHERES)
def test_signals_of_one_task_reach_every_task(prepared, where):
    """From a call of the inner loop and from asking: nothing, a checkpoint, an end, and both.

    Every replica of the task reports what it wants, so that several of them come back added up.
    """
    strategy = strategy_called(where)
    with strategy.scope():
        model = new_model(0)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    train_step = TrainStep(model, GradientPolicy(optimizer), OBJECTIVE, GLOBAL_BATCH, strategy.num_replicas_in_sync)
    feed = sources.train_feed(strategy, prepared["own:plain"], 0, GLOBAL_BATCH, SEED)
    expected = [steps.Signals(*signals) for signals in SIGNALS]
    run = steps.SynchronousSteps(strategy, train_step, feed, STEPS)
    agree = steps.agreement(strategy)
    assert expected == [run(step, 1, lambda *_, one=one: one).signals for step, one in enumerate(expected)]
    assert expected == [agree(one) for one in expected]
    replicas = strategy.num_replicas_in_sync
    assert [[-1] * replicas, [2**40] * replicas] == [steps.gathering(strategy)(number) for number in (-1, 2**40)]


# Evaluation


@pytest.mark.parametrize("kind", ["gathered", "read"])
@pytest.mark.parametrize("where", ["alone", *WHERES])
def test_evaluation_takes_each_of_1003_examples_once_at_any_replica_count(prepared, where, kind):
    """Also the second time, and without the weights that the split has."""
    source = prepared["own:weighted"]
    examples, model = memory.load(source.arrays.test), new_model(0)
    logits_NK = model(examples.features)
    losses_N = tf.nn.sparse_softmax_cross_entropy_with_logits(examples.labels, logits_NK)
    accuracy = int(np.sum(np.argmax(logits_NK, -1) == examples.labels.numpy())) / NUM_TEST
    strategy = None if where == "alone" else strategy_called(where)
    with strategy.scope() if strategy else tf.device(None):
        model = new_model(0)
    feed = sources.eval_feed(strategy, source if kind == "gathered" else dataclasses.replace(source, arrays=None), 100)
    evaluate = steps.evaluation(strategy, model, OBJECTIVE, feed, num_examples=NUM_TEST, batch=100)
    results = [evaluate(), evaluate()]
    assert [accuracy] * 2 == [result["eval_accuracy"] for result in results]
    mean_loss = float(tf.reduce_mean(tf.cast(losses_N, tf.float64)))
    np.testing.assert_allclose([result["eval_loss"] for result in results], mean_loss, rtol=1e-6)


# Feeds


def labels_of(where: str, source: sources.Source, first_step: int = 1) -> list[list[list[int]]]:
    """Return the labels that each replica is fed in the steps 1, 2 and 3."""
    strategy = strategy_called(where)
    feed = sources.train_feed(strategy, source, first_step, GLOBAL_BATCH, SEED)

    @tf.function
    def batch(step: tf.Tensor) -> Any:
        def replica(given: Any) -> tf.Tensor:
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
            return feed.batch(given, step, number).labels

        return strategy.run(replica, args=(feed.next(),))

    batches = [strategy.experimental_local_results(batch(tf.constant(step, tf.int64))) for step in (1, 2, 3)]
    return [[labels_B.numpy().tolist() for labels_B in of_step] for of_step in batches]


@pytest.fixture(scope="module")
def fed(prepared) -> dict[str, sources.Source]:
    read = dataclasses.replace(prepared["own:plain"], arrays=None)
    return {"arrays": prepared["own:plain"], "dataset": read, "shards": prepared["numbers"]}


@pytest.mark.parametrize("where", WHERES[1:] or WHERES)
@pytest.mark.parametrize("kind", ["arrays", "dataset", "shards"])
def test_replicas_are_fed_the_parts_of_the_global_batch(fed, kind, where):
    one, several = labels_of("one", fed[kind]), labels_of(where, fed[kind])
    count = strategy_called(where).num_replicas_in_sync
    assert [[12]] * 3 == [[len(part) for part in step] for step in one]
    assert [[12 // count] * count] * 3 == [[len(part) for part in step] for step in several]
    assert [step[0] for step in one] == [[label for part in step for label in part] for step in several]


def test_arrays_are_fed_the_same_gathered_or_read(fed):
    assert labels_of(WHERES[-1], fed["arrays"]) == labels_of(WHERES[-1], fed["dataset"])
    assert 1 < len({str(step) for step in labels_of("one", fed["arrays"])})


def test_shards_are_fed_from_the_step_on_that_training_resumes_from(fed):
    from_the_second = labels_of("one", fed["shards"])[:2]
    assert labels_of("one", fed["shards"], first_step=0)[1:] == from_the_second
    assert 24 == len({label for step in from_the_second for label in step[0]})
