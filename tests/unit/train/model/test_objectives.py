"""Losses and scores of every example, the built-in ones and a user's."""

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import objectives


@pytest.mark.parametrize("outputs", [1, 3])
def test_errors_of_quantities_are_means_over_an_examples_outputs(outputs):
    """Labels `[B, K]`, and `[B]` where there is one: never the differences of all pairs."""
    objective = objectives.build_by_name("mean_squared_error", classifies=False)
    labels_BK = np.arange(4 * outputs, dtype=np.float32).reshape(4, outputs)
    outputs_BK = labels_BK + np.array([[1], [-2], [0], [4]], np.float32)
    for labels in (labels_BK, labels_BK[:, 0])[: 2 if outputs == 1 else 1]:
        loss_B, score_B = objective.loss(labels, outputs_BK), objective.score(labels, outputs_BK)
        assert ([1, 4, 0, 16], [1, 2, 0, 4]) == (loss_B.numpy().tolist(), score_B.numpy().tolist())
    assert "absolute_error" == objective.score_name


def _branching(labels_B: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(outputs_BK) > 0:
        return outputs_BK[:, 0]
    return -outputs_BK[:, 0]


@pytest.mark.parametrize("classifies", [True, False])
def test_a_users_loss_keeps_the_score_of_the_data(classifies, monkeypatch):
    """It may branch on tensors, also where what calls it is not converted by autograph: as in our steps."""
    module = types.ModuleType("own_losses")
    module.branching = _branching  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_losses", module)
    objective = objectives.build_by_name("own_losses:branching", classifies=classifies)
    called = tf.function(objective.loss, autograph=False)
    assert [[2.0, 3.0], [2.0, 3.0]] == [
        called(tf.zeros([2]), tf.constant([[2.0], [3.0]]) * s).numpy().tolist() for s in (1.0, -1.0)
    ]
    assert ("accuracy" if classifies else "absolute_error") == objective.score_name


@pytest.mark.parametrize(
    ("loss", "labels", "outputs"),
    [
        ("sparse_categorical_crossentropy", (), (6,)),
        ("sparse_categorical_crossentropy", (3,), (5,)),
        ("sparse_categorical_crossentropy", (3,), (4, 5)),
        ("sparse_categorical_crossentropy", (), None),
        ("sparse_categorical_crossentropy", (), {"a": (5,)}),
        ("mean_squared_error", (5,), (1,)),
        ("mean_squared_error", (3, 4), (4, 3)),
        ("mean_squared_error", (), ()),
    ],
)
def test_outputs_that_a_built_in_loss_cannot_compare_are_refused(loss, labels, outputs):
    with pytest.raises(UsageError, match="^--model"):
        objectives.check_outputs(TrainConfig(loss=loss), 5, (labels, outputs))


@pytest.mark.parametrize("outputs", [(64,), (1,), (), None, {"mean": (2,), "spread": (2,)}])
def test_a_users_loss_takes_any_outputs(outputs, monkeypatch):
    """Where they cannot be compared with the labels, the score is the loss alone."""
    module = types.ModuleType("own_losses")
    module.any = lambda labels, outputs: tf.cast(labels, tf.float32)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_losses", module)
    config = TrainConfig(loss="own_losses:any", loop="custom")
    objectives.check_outputs(config, 5, ((), outputs))
    objective = objectives.build_configured(config, classifies=True, shapes=lambda: ((), outputs))
    names = {(1,): "absolute_error", (64,): "accuracy"}
    assert objective.score_name == (names.get(outputs, "data_loss") if isinstance(outputs, tuple) else "data_loss")
    assert [2.0, 3.0] == objective.loss(tf.constant([2, 3]), None).numpy().tolist()


@pytest.mark.parametrize("made", [None, {}, {"Upper": abs}, {"twos": 2}, {"accuracy": abs}])
def test_invalid_metrics_are_refused(monkeypatch, made):
    module = types.ModuleType("own_metrics")
    module.made = lambda: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_metrics", module)
    with pytest.raises(UsageError, match="^--metrics 'own_metrics:made'"):
        objectives.build_configured(TrainConfig(metrics="own_metrics:made"), classifies=True)
