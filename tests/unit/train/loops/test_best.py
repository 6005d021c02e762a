"""The best evaluation and early stopping: better values, the end of training, and resuming."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.loops.actions import EarlyStop, check_metric
from train.model import objectives, optimizers
from train.saving.checkpoint import Checkpoint, Encoded
from train.saving.files import BEST, finished
from train.settings.stopping import Best as Settings


def followed(values: list[float], total: int = 100, state: Encoded | None = None, **settings: Any) -> EarlyStop:
    best = EarlyStop(Settings(**{"metric": "eval_loss"} | settings), total, state or Encoded("best"))
    for step, value in enumerate(values, start=1):
        best.follow(step, {"eval_loss": value, "eval_accuracy": value})
    return best


@pytest.mark.parametrize(
    ("settings", "value", "step"),
    [
        ({}, 0.5, 3),
        ({"metric": "eval_accuracy"}, 2.0, 2),
        ({"mode": "max"}, 2.0, 2),
        ({"min_delta": 0.6}, 1.0, 1),
    ],
)
def test_the_best_is_the_first_that_is_better_by_enough(settings, value, step):
    best = followed([1.0, 2.0, 0.5, 0.5, math.nan], **settings)
    assert (value, step) == (best.value, best.step)


@pytest.mark.parametrize(("patience", "enough"), [(0, False), (2, True), (3, False)])
def test_training_ends_after_as_many_evaluations_without_a_better_one(patience, enough):
    assert enough == followed([1.0, 0.5, 0.6, 0.7], patience=patience).stops


def test_a_resumed_training_continues_to_count():
    state = Encoded("best")
    followed([1.0, 0.1 + 0.2, 0.5], state=state, patience=2).keep()
    again = EarlyStop(Settings(metric="eval_loss", patience=2), 100, state)
    assert (0.1 + 0.2, 2, False) == (again.value, again.step, again.stops)
    assert not again.follow(4, {"eval_loss": 0.4})
    assert again.stops


def test_a_training_that_has_ended_stays_so_unless_it_gets_more_steps():
    state = Encoded("best")
    followed([1.0, 2.0], state=state, patience=1).keep()
    assert EarlyStop(Settings(metric="eval_loss", patience=1), 100, state).stops
    assert not EarlyStop(Settings(metric="eval_loss", patience=1), 200, state).stops


def test_a_metric_that_the_evaluations_do_not_have_is_refused():
    objective = objectives.build("mean_squared_error", classifies=False)
    for metric, known in (("eval_absolute_error", True), ("eval_accuracy", False)):
        context: Any = SimpleNamespace(objective=objective, config=TrainConfig(best=Settings(metric=metric)))
        if known:
            check_metric(context)
        else:
            with pytest.raises(UsageError, match=f"--best.metric '{metric}'"):
                check_metric(context)


def test_one_best_checkpoint_is_kept_next_to_the_newest(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = Encoded("best")

    def saving(own: Encoded) -> Checkpoint:
        parts = model, optimizers.build_for(TrainConfig(), model), tf.Variable(0, dtype=tf.int64)
        return Checkpoint(*parts, tmp_path, keep=2, writes=True, best=own)

    saves, best = saving(state), followed([0.5], state=state)
    for step in (1, 2, 3, 4):
        if step in (1, 3):
            saves.save(step, best=True)
        best.keep()
        saves.save(step)
    saves.wait()
    assert [4, 3] == [saved.step for saved in finished(tmp_path)]
    assert [3] == [saved.step for saved in finished(tmp_path / BEST)]
    restored = Encoded("best")
    assert 4 == saving(restored).restore()
    assert 0.5 == EarlyStop(Settings(metric="eval_loss"), 100, restored).value
