"""Keras callbacks in the custom loop: called as by `Model.fit`, and able to do what they can do there."""

from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import RunFailed, UsageError
from tests.support.callback_training import EPOCH_ENDS
from train.loops import fit
from train.loops.actions import Evaluate


def batches(*first_and_last: tuple[int, int]) -> list[tuple[str, int]]:
    """Return the reports of inner calls that do these steps of the epoch."""
    return [call for first, last in first_and_last for call in (("batch begins", first), ("batch ends", last))]


def test_a_training_is_reported_from_its_beginning_to_its_end(train):
    """An inner call, of two steps at most, is one batch; the first two of all are one step each."""
    trained = train(13)
    expected = [
        ("train begins", -1),
        ("epoch begins", 0), *batches((0, 0), (1, 1), (2, 3), (4, 4)), ("epoch ends", 0),
        ("epoch begins", 1), *batches((0, 1), (2, 3)), ("epoch ends", 1),
        ("epoch begins", 2), *batches((0, 1), (2, 3)), ("epoch ends", 2),
        ("train ends", -1),
    ]  # fmt: skip
    assert expected == trained.recorder.names
    assert {"epochs": 3, "steps": 5} == {name: trained.recorder.params[name] for name in ("epochs", "steps")}

    losses = np.split(np.array([row["loss"] for row in trained.rows if "loss" in row]), [5, 9])
    ends = trained.recorder.logs("epoch ends")
    np.testing.assert_allclose([logs["loss"] for logs in ends], [epoch.mean() for epoch in losses], rtol=1e-6)
    evaluations = [row for row in trained.rows if "eval_loss" in row]
    for name in ("loss", "absolute_error"):
        assert [row[f"eval_{name}"] for row in evaluations] == [logs[f"val_{name}"] for logs in ends]
    assert {"loss", "absolute_error", "val_loss", "val_absolute_error", "val_retrieval_at_1"} == set(ends[0])
    assert [ends[-1]] == trained.recorder.logs("train ends")
    running = [logs["loss"] for logs in trained.recorder.logs("batch ends")]
    expected_means = [epoch[:count].mean() for epoch, counts in zip(losses, ((1, 2, 4, 5), (2, 4), (2, 4)), strict=True)
                      for count in counts]  # fmt: skip
    np.testing.assert_allclose(running, expected_means, rtol=1e-6)


def test_an_epoch_without_an_evaluation_has_no_results(train):
    """EarlyStopping would count the last results, given once more, as no improvement."""
    ends = train(14, evaluate_every=5).recorder.logs("epoch ends")
    assert [True, False, True] == ["val_loss" in logs for logs in ends]


def test_a_callback_can_end_the_training_between_two_inner_calls(train):
    class Enough(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    trained = train(25, Enough())
    assert 2 == trained.steps  # noticed at the beginning of the second call, which all tasks finish
    assert [("batch ends", 1), ("epoch ends", 0), ("train ends", -1)] == trained.recorder.names[-3:]


def test_the_callbacks_of_the_tutorial_work(train, capsys):
    run = train(EPOCH_ENDS[4], callbacks="tutorial").run
    shown = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "learning rate to" in line]
    assert ["0.001.", "0.001.", "0.001.", "0.0001."] == shown
    assert 4 == len(list(run.path.glob("callbacks/chief/epoch-*.weights.h5")))
    assert list(run.path.glob("tensorboard/chief/keras/train/events*"))


@pytest.mark.parametrize("loop", ["custom", "fit"])
def test_callbacks_get_every_epoch(train, loop):
    """4.5 steps are an epoch: rounded up, 10 of them would be 9."""
    recorder = train(10_000, epochs=10, steps_per_loop=5, loop=loop).recorder
    assert 1 == recorder.names.count(("train begins", -1)) == recorder.names.count(("train ends", -1))
    assert list(range(10)) == [epoch for name, epoch in recorder.names if name == "epoch ends"]
    assert 10 == recorder.params["epochs"]


class Measures(keras.Model):
    """As in Keras's guide: a `train_step` with metrics of the model's own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        features, labels = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(features, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "largest": tf.reduce_max(tf.abs(labels)), "by_class": tf.ones([3])}


class Nameless(Measures):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {"d_loss": super().train_step(data)["loss"]}


def test_fit_logs_what_a_train_step_returns(train):
    logs = train(5, loop="fit", model=Measures).recorder.logs("epoch ends")[0]
    assert {"loss", "largest", "val_loss", "val_absolute_error", "val_retrieval_at_1"} == set(logs)
    assert logs["largest"] > 0


class Late(Measures):
    """Has a layer that only its `train_step` calls."""

    def train_step(self, data: Any) -> dict[str, Any]:
        if not hasattr(self, "late"):
            self.late = keras.layers.Dense(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.late(data[0]))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(("model", "named"), [(Nameless, "d_loss"), (Late, "Late.train_step")])
def test_a_train_step_without_a_loss_or_that_creates_weights_is_refused(train, model, named):
    with pytest.raises(UsageError, match=named):
        train(5, loop="fit", model=model)


@pytest.mark.parametrize("loop", ["custom", "fit"])
def test_callbacks_may_evaluate_copy_and_save_the_model(train, tmp_path, loop):
    found = []

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            features = np.random.default_rng(0).normal(size=(18, 2)).astype(np.float32)[:7]
            found.append((self.model.evaluate(features, features[:, 0], verbose=0), logs))
            self.model.save(tmp_path / "model.keras")
            copies = [keras.models.clone_model(self.model), keras.models.load_model(tmp_path / "model.keras")]
            copies[0].set_weights(self.model.get_weights())
            for copy in copies:
                np.testing.assert_array_equal(copy.predict(features, verbose=0), self.model(features))

    train(5, Evaluates(), loop=loop)
    (evaluated, logs), *_ = found
    np.testing.assert_allclose(evaluated, [logs["val_loss"], logs["val_absolute_error"]], rtol=1e-5)


@pytest.mark.parametrize("loop", ["custom", "fit"])
def test_a_stop_at_the_beginning_of_an_epoch_ends_the_training(train, loop):
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    assert 5 < train(25, Stops(), loop=loop).steps < 9


def test_callbacks_that_freeze_layers_are_refused(train):
    """The step is compiled for the layers that train; only a restart would compile it again."""

    class Freezes(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.layers[-1].trainable = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[-1].trainable = epoch > 0

    with pytest.raises(UsageError, match="--freeze"):
        train(25, Freezes())


def test_a_loss_of_fit_that_is_not_finite_ends_the_run(train, own_parts):
    own_parts.loss = lambda labels, outputs: outputs[:, 0] / 0.0
    with pytest.raises(RunFailed, match=r"^loss is (nan|inf|-inf) at step 1; lower --optimizer.learning-rate"):
        train(5, loop="fit")


def test_steps_inside_an_epoch_of_keras_are_reported():
    context = Mock(**{"model.optimizer.iterations": tf.Variable(7), "heartbeat.current.state": "compiling"})
    fit.ActionsCallback(context, Mock(finished=False), Mock(step=4), None)
    context.heartbeat.position()  # as under parameter servers, where Keras calls back only after an epoch
    context.heartbeat.update.assert_called_once_with(step=7, state="training")


def test_callbacks_around_an_evaluation_may_take_as_long_as_it():
    parts = MagicMock()
    Evaluate(Mock(**{"config.evaluate_every": 4}), parts.report, Mock(), parts.callbacks).evaluate(4)
    order = [name for name, *_ in parts.mock_calls if name.endswith(("__enter__", ".evaluate"))]
    assert ["report.evaluating().__enter__", "callbacks.evaluating().__enter__", "report.evaluate"] == order
