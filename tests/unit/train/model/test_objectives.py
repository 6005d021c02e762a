"""Losses and scores of every example, and the share of their mean that a replica computes."""

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import objectives

VALUES = np.array([0.3, 2.0, 5.5, 1.25, 0.1], np.float32)
WEIGHTS = np.array([1.0, 0.5, 3.0, 0.0, 2.0], np.float32)


def shares(*parts: slice, weights: np.ndarray = WEIGHTS, examples: int = 5) -> float:
    """Return the sum of the shares of replicas that have these parts of the batch."""
    return float(sum(objectives.global_mean(VALUES[part], weights[part], examples) for part in parts))


@pytest.mark.parametrize("parts", [[slice(0, 5)], [slice(0, 3), slice(3, 5)], [slice(0, 1), slice(1, 4), slice(4, 5)]])
def test_unequal_shares_add_up_to_the_weighted_losses_divided_by_the_batch(parts):
    np.testing.assert_allclose(shares(*parts), (WEIGHTS * VALUES).sum() / 5, rtol=1e-6)


def test_padding_does_not_count():
    """Three replicas of two: the last one's second example is padding, of any value."""
    padded = np.append(VALUES, np.float32(1e6)), np.append(np.ones(5, np.float32), np.float32(0))
    values, weights = (array.reshape(3, 2) for array in padded)
    total = sum(float(objectives.global_mean(*one, 5)) for one in zip(values, weights, strict=True))
    np.testing.assert_allclose(total, VALUES.mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_and_accuracy_are_of_each_example(dtype):
    """Whatever the precision of the logits."""
    objective = objectives.build("sparse_categorical_crossentropy", classifies=True)
    logits_BK = np.array([[2.0, 0.5, -1.0], [0.0, 0.0, 4.0]])
    labels_B = tf.constant([0, 1], tf.int64)
    expected_B = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits_BK, (0, 1), strict=True)]
    loss_B = objective.loss(labels_B, tf.constant(logits_BK, dtype))
    assert (tf.float32, (2,)) == (loss_B.dtype, tuple(loss_B.shape))
    np.testing.assert_allclose(loss_B, expected_B, rtol=1e-6)
    assert [1, 0] == objective.score(labels_B, tf.constant(logits_BK, dtype)).numpy().tolist()
    assert "accuracy" == objective.score_name


@pytest.mark.parametrize("outputs", [1, 3])
def test_errors_of_quantities_are_means_over_an_examples_outputs(outputs):
    """Labels `[B, K]`, and `[B]` where there is one: never the differences of all pairs."""
    objective = objectives.build("mean_squared_error", classifies=False)
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
    objective = objectives.build("own_losses:branching", classifies=classifies)
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
    objective = objectives.of(config, classifies=True, predicts_text=False, shapes=lambda: ((), outputs))
    names = {(1,): "absolute_error", (64,): "accuracy"}
    assert objective.score_name == (names.get(outputs, "data_loss") if isinstance(outputs, tuple) else "data_loss")
    assert [2.0, 3.0] == objective.loss(tf.constant([2, 3]), None).numpy().tolist()


@pytest.mark.parametrize("made", [None, {}, {"Upper": abs}, {"twos": 2}, {"accuracy": abs}])
def test_invalid_metrics_are_refused(monkeypatch, made):
    module = types.ModuleType("own_metrics")
    module.made = lambda: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_metrics", module)
    with pytest.raises(UsageError, match="^--metrics 'own_metrics:made'"):
        objectives.of(TrainConfig(metrics="own_metrics:made"), classifies=True, predicts_text=False)
