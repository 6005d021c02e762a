"""Silent corruption is found by a comparison of all copies of the weights, and the right task is named."""

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.contract import spec
from cluster.contract.run.records import Place
from cluster.system.errors import EXIT_BUG, EXIT_PEER_LOST, UsageError
from train.config import TrainConfig
from train.loops import replica_check
from train.loops.loop import Stop
from train.loops.replica_check import FlipBit, ReplicaCheck, ReplicasDiffer
from train.loops.training import Training
from train.model.gradients import GradientPolicy, LossScale
from train.telemetry.positions import Positions

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8")
GANG = spec.build(workers=2)


def number_of(*values: np.ndarray) -> int:
    return replica_check.digests([tf.Variable(value) for value in values], 1)[0]


def context_of(task: str = "chief", interval: int | str = "auto", **parts: Any) -> Any:
    """Return the parts of a task's context that a comparison uses."""
    parts = {"spec": GANG, "config": TrainConfig(check_replicas=interval), "positions": Positions()} | parts
    return SimpleNamespace(task=SimpleNamespace(name=task), **parts)


def compare(task: str, numbers: list[int], interval: int | str = "auto", step: int = 3) -> None:
    """Compare this task's copies with others, whose numbers are those of this task plus these."""

    def gather(own: int) -> list[int]:
        return [own + number for number in numbers]

    check = ReplicaCheck(context_of(task, interval), lambda: [tf.Variable([1.0, 2.0])], gather)
    check.compare(step, again=True)


def test_frozen_weights_and_averages_of_layers_are_compared_and_seeds_are_not():
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    layers[0].trainable = False
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model.trainable_variables)
    compared = replica_check.copied_variables(model, GradientPolicy(optimizer, loss_scale=LossScale()))
    names = {getattr(each, "path", each.name).rpartition("/")[2] for each in compared}
    assert {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"} <= names
    assert not [name for name in names if "seed" in name]
    assert len(model.weights) + len(optimizer.variables) + 3 == len(compared)  # three of the loss scale


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_changes_the_number(seed):
    dice = random.Random(seed)
    shape = [dice.randrange(1, 8) for _ in range(dice.randrange(4))]
    drawn = [9 * np.asarray(np.random.RandomState(seed).randn(*shape)) for _ in "ab"]
    values = [np.asarray(tf.cast(each, dice.choice(DTYPES)).numpy()) for each in drawn]
    whole, flipped = number_of(*values), values[1].copy()
    octets = flipped.reshape(-1).view(np.uint8)
    octets[dice.randrange(octets.size)] ^= 1 << dice.randrange(8)
    assert whole != number_of(values[0], flipped)
    assert whole == number_of(*values)


def test_variables_that_changed_places_change_the_number():
    first, second = np.float32([1, 2]), np.float32([3, 4])
    assert number_of(first, second) != number_of(second, first)


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ([0, 0, 5], {"worker-1"}),
        ([7, 0, 0], {"chief"}),
        ([1, 2, 3], {"chief", "worker-0", "worker-1"}),  # no majority
    ],
)
def test_the_task_without_the_majority_s_bits_is_named(numbers, named):
    for task in GANG.tasks:
        with pytest.raises(ReplicasDiffer) as raised:
            compare(task.name, numbers)
        assert (EXIT_BUG if task.name in named else EXIT_PEER_LOST) == raised.value.exit_code
        assert named == {each.name for each in GANG.tasks if each.name in str(raised.value)}


def test_different_initial_weights_are_a_mistake_of_the_model_in_all_tasks():
    for task in GANG.tasks:
        with pytest.raises(UsageError, match="--model"):
            compare(task.name, [0, 0, 5], step=0)


def test_equal_copies_pass_and_zero_ends_the_checks():
    compare("chief", [0, 0, 0])
    compare("chief", [0, 0, 5], interval=0)


def test_the_heartbeat_of_a_task_that_waits_for_the_others_copies_says_so():
    positions, waiting = Positions(), []

    def gather(own: int) -> list[int]:
        waiting.append(positions.current())
        return [own] * 3

    ReplicaCheck(context_of(positions=positions), list, gather).compare(3)
    assert [(Place.COMPARISON, 3, False)] == [(each.place, each.step, each.left) for each in waiting]
    assert positions.current().left


def test_what_an_exchange_takes_beyond_the_shortest_is_waiting_and_a_step_is_compared_again_on_request(monkeypatch):
    now, exchanges_s = [0.0], iter([3.0, 1.0, 2.5, 4.0])

    def gather(own: int) -> list[int]:
        now[0] += next(exchanges_s)
        return [own] * 3

    monkeypatch.setattr(replica_check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    check = ReplicaCheck(context_of(), list, gather)
    assert [0.0, 0.0, 1.5, 0.0] == [check.compare(step) for step in (1, 2, 3, 3)]
    assert 3.0 == check.compare(3, again=True)


@pytest.mark.parametrize("has_callbacks", [False, True])
def test_the_weights_are_compared_again_after_the_last_evaluation_and_before_callbacks_may_change_them(has_callbacks):
    training = MagicMock(**{"report.evaluated_at": 0, "save.saved_at": 8, "_context.task_stages": None})
    training.agree, training.callbacks.end.return_value = lambda signals: signals, False
    if not has_callbacks:
        training.callbacks = None
    Training.end(training, 9, Stop.END)
    done = [each for each in training.mock_calls if "__" not in each[0] and each[0] != "report.evaluating"]
    ended, saved = call.callbacks.end(9, stopped=False), call.save.save(9)
    first, last = ([], [ended, saved]) if has_callbacks else ([saved], [])
    compared = [call._check.compare(9), *first, call._evaluate.evaluate(9), call._check.compare(9, again=True), *last]
    written = [call._context.heartbeat.update(state="saving"), call._setup.checkpoint.release()]  # not a hang
    assert [*compared, *written, call.report.end(9, stopped=False)] == done


def test_a_snapshot_is_kept_before_the_comparison_in_which_a_task_may_be_lost():
    training = MagicMock()
    Training._keep_snapshot(training, 9)
    kept = call._setup.checkpoint.keep_snapshot(9, training._setup.snapshots)
    done = [each for each in training.mock_calls if "__" not in each[0]]
    assert [call.callbacks.store_state(), kept, call._check.compare(9)] == done


@pytest.mark.parametrize("restored", [False, True])
def test_snapshots_of_copies_that_differ_are_discarded(restored):
    """Also if the program that kept them was lost before it compared them, and another restored them."""
    kept = MagicMock()
    check = ReplicaCheck(context_of(), list, lambda own: [own, own, own + 1], kept)
    training = SimpleNamespace(_check=check, first=3)
    with pytest.raises(ReplicasDiffer):
        Training.begin(training) if restored else check.compare(3)  # type: ignore[arg-type]
    kept.discard.assert_called_once_with(3)


@pytest.mark.parametrize("lost", [False, True])
def test_no_task_ends_before_all_others_have_the_numbers(lost):
    gathered = []

    def gather(own: int) -> list[int]:
        gathered.append(own)
        if lost and len(gathered) == 2:  # a task that has the numbers of all others has ended
            raise tf.errors.UnavailableError(None, None, "")
        return [own, own, own + 1]

    with pytest.raises(ReplicasDiffer):
        ReplicaCheck(context_of(), list, gather).compare(3)
    assert 2 == len(gathered)


@pytest.mark.parametrize("values", [[np.float32(2)], [np.zeros(3, np.float32), np.float32([[0, 3], [1e-38, 0]])]])
def test_a_flip_changes_one_bit_of_a_value_in_use_and_its_event_names_it(make_run, values):
    run, variables = make_run(workers=1), [tf.Variable(value, name="weight") for value in values]
    run.flip_request("chief").touch()
    FlipBit(context_of(run=run), lambda: variables).before(7)
    assert not run.flip_request("chief").exists()
    before, after = np.atleast_1d(values[-1]), np.atleast_1d(variables[-1].numpy())
    bits = before.view(np.uint32) ^ after.view(np.uint32)
    (changed,) = np.flatnonzero(bits)
    (event,) = [event for event in run.events() if event.event == "flipped"]
    assert ("chief", 7, changed) == (event.task, event.step, event.detail["index"])
    assert 1 << event.detail["bit"] == bits.reshape(-1)[changed]
    assert before.reshape(-1)[changed] in (2, 3)


def test_a_flip_waits_until_a_weight_is_not_zero(make_run):
    run = make_run(workers=1)
    run.flip_request("chief").touch()
    FlipBit(context_of(run=run), lambda: [tf.Variable([0.0, 0.0])]).before(0)
    assert run.flip_request("chief").exists()
