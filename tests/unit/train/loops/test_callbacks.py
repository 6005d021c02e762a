"""Keras callbacks in the custom loop: called as by `Model.fit`, and able to do what they can do there."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.system.errors import RunFailed, UsageError
from cluster.system.json_files import read_json, read_json_lines
from tests.support import own_module
from train.config import Optimizer, TrainConfig
from train.context import TaskContext
from train.data import opening
from train.data.prepare.preparation import write_arrays
from train.loops import custom, fit
from train.loops.actions import Evaluate
from train.model import objectives

EXAMPLES, GLOBAL_BATCH = 18, 4
EPOCH_ENDS = (0, 5, 9, 14, 18, 23, 27, 32, 36, 41)
"""A batch may end one epoch and begin the next: epochs of 5 and of 4 steps, none of which drifts from the examples."""
CONFIG = TrainConfig(
    dataset="own_parts:data",
    loss="own_parts:loss",
    callbacks="own_parts:callbacks",
    global_batch=GLOBAL_BATCH,
    epochs=100,
    steps_per_loop=2,
    log_every=1,
    optimizer=Optimizer("sgd", 0.1, warmup_steps=0, momentum=0.0),
)


class Log:
    """What a recorder keeps; without `__dict__`, so that no checkpoint has it and each generation begins its own."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, float]]] = []


class Recorder(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self._log = Log()
        for part, index in (("train", (-1,)), ("epoch", ()), ("train_batch", ())):
            for end in ("begin", "end"):
                name = f"{part.removeprefix('train_')} {end}s"
                setattr(self, f"on_{part}_{end}", functools.partial(self._record, name, *index))

    def _record(self, name: str, index: int, logs: dict[str, float] | None) -> None:
        self._log.calls.append((name, index, dict(logs or {})))

    @property
    def names(self) -> list[tuple[str, int]]:
        """What it was called with, without logs."""
        return [one[:2] for one in self._log.calls]

    def logs(self, name: str) -> list[dict[str, float]]:
        return [logs for called, _, logs in self._log.calls if called == name]


@dataclasses.dataclass
class Trained:
    run: RunFolder
    recorder: Recorder

    @property
    def steps(self) -> int:
        return read_json(self.run.control / "result.json")["steps"]

    @property
    def rows(self) -> list[dict[str, float]]:
        return list(read_json_lines(self.run.metrics("chief")))


@pytest.fixture
def own_parts(monkeypatch) -> Any:
    """The user's module. The loss is the output itself: the bias goes down by the learning rate at every step."""
    values = {"loss": lambda labels, outputs: outputs[:, 0], "stop": threading.Event()}
    return own_module.put(monkeypatch, "own_parts", **values)


@pytest.fixture
def train(own_parts, make_run, tmp_path) -> Callable[..., Trained]:
    """Trains, or trains on, for some steps with callbacks of the user's own after a recording one."""
    run, data_dir = make_run(workers=0), tmp_path / "data"
    features = np.random.default_rng(0).normal(size=(EXAMPLES, 2)).astype(np.float32)
    splits = {"train": (features, features[:, 0]), "test": (features[:7], features[:7, 0])}
    write_arrays(data_dir, CONFIG.dataset, "1", splits)

    def do(
        steps: int,
        *others: keras.callbacks.Callback,
        callbacks: str = CONFIG.callbacks,
        model: type[keras.Model] = keras.Model,
        **values: Any,
    ) -> Trained:
        recorder = Recorder()
        own_parts.callbacks = lambda run, task: [recorder, *others]
        config = dataclasses.replace(CONFIG, max_steps=steps, callbacks=callbacks, **values)
        source = opening.open_source(config, data_dir)
        strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
        keras.utils.set_random_seed(1)

        def new_model() -> keras.Model:
            features = keras.Input((2,))
            return model(features, keras.layers.Dense(1)(features))

        with strategy.scope():
            trained = new_model()
        spec = run.load_cluster()
        context = TaskContext(
            run=run,
            task=spec.task("chief"),
            spec=spec,
            config=config,
            source=source,
            objective=dataclasses.replace(
                objectives.build_by_name(config.loss, classifies=source.classifies),
                metrics={"retrieval_at_1": lambda labels, outputs: outputs[:, 0]},
            ),
            strategy=strategy,
            gang=strategy,
            model=trained,
            new_model=new_model,
            heartbeat=HeartbeatWriter(run, spec.task("chief"), 0),
            stop=own_parts.stop,
        )
        try:
            if config.loop == "fit":
                fit.train(context)
            else:
                custom.train(custom.prepare(context))
        except Killed:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()  # a process that is killed writes nothing more
            raise
        return Trained(run, recorder)

    return do


def batches(*first_and_last: tuple[int, int]) -> list[tuple[str, int]]:
    """Return the reports of inner calls that do these steps of the epoch."""
    return [call for first, last in first_and_last for call in (("batch begins", first), ("batch ends", last))]


def test_a_training_is_reported_from_its_beginning_to_its_end(train):
    """An inner call, of two steps at most, is one batch; the first one of all is one step."""
    trained = train(13)
    expected = [
        ("train begins", -1),
        ("epoch begins", 0), *batches((0, 0), (1, 2), (3, 4)), ("epoch ends", 0),
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
    expected_means = [epoch[:count].mean() for epoch, counts in zip(losses, ((1, 3, 5), (2, 4), (2, 4)), strict=True)
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
    assert 3 == trained.steps  # noticed at the beginning of the second call, which all tasks finish
    assert [("batch ends", 2), ("epoch ends", 0), ("train ends", -1)] == trained.recorder.names[-3:]


def test_the_callbacks_of_the_tutorial_work(train, capsys):
    run = train(EPOCH_ENDS[4], callbacks="tutorial").run
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate")]
    rates = ["0.001", "0.001", "0.001", "0.0001"]
    assert [f"learning rate of epoch {number}: {rate}" for number, rate in enumerate(rates, start=1)] == lines
    assert 4 == len(list(run.path.glob("callbacks/chief/epoch-*.weights.h5")))
    assert list(run.path.glob("tensorboard/chief/keras/train/events*"))


@pytest.mark.parametrize("loop", ["custom", "fit"])
def test_callbacks_get_every_epoch(train, loop):
    """4.5 steps are an epoch: rounded up, 10 of them would be 9."""
    recorder = train(10_000, epochs=10, steps_per_loop=5, loop=loop).recorder
    assert 1 == recorder.names.count(("train begins", -1)) == recorder.names.count(("train ends", -1))
    assert list(range(10)) == [epoch for name, epoch in recorder.names if name == "epoch ends"]
    assert 10 == recorder.params["epochs"]


class Killed(Exception):
    """In place of a signal."""


class Draws(keras.callbacks.Callback):
    """Changes the rate by random numbers, and keeps what it was called with, in a Counter and a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._random, self.calls, self.file = np.random.default_rng(3), collections.Counter(), file
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.2

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls[batch] += 1
        self.model.optimizer.learning_rate = 0.1 * self._random.uniform()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((epoch, dict(logs)))

    def on_train_end(self, logs: Any = None) -> None:
        self.file.write_text(repr((sorted(self.calls.items()), self.seen, logs)))


class KillAt(keras.callbacks.Callback):
    """Ends the process, as it were, at one of its calls, which are counted in each generation."""

    def __init__(self, call: int) -> None:
        super().__init__()
        calls = iter(range(1, call))

        def count(*_index: int, logs: Any = None) -> None:
            if next(calls, None) is None:
                raise Killed

        if call:
            for name in ("train_batch_begin", "train_batch_end", "epoch_begin", "epoch_end", "test_begin", "test_end"):
                setattr(self, f"on_{name}", count)


def settled(run: Path, call: int = 0) -> list[keras.callbacks.Callback]:
    """Return callbacks whose every part of state decides over weights or files; and where to be killed."""
    counts = {"epochs": 0}

    def count(epoch: int, logs: Any) -> None:
        counts["epochs"] += 1
        (run / "epochs").write_text(str(counts["epochs"]))

    return [
        Draws(run / "draws"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", mode="max", factor=0.5, patience=1, min_lr=0.0),
        keras.callbacks.CSVLogger(run / "log.csv"),
        keras.callbacks.ModelCheckpoint(
            str(run / "{epoch:02d}-{batch:02d}.weights.h5"), save_freq=4, save_weights_only=True
        ),
        keras.callbacks.LambdaCallback(on_epoch_end=count),
        KillAt(call),
    ]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("loop", "options", "kills"),
    [("custom", {"checkpoint_every": 3, "evaluate_every": 4}, [12, 14]), ("fit", {"checkpoint_every": 2}, [11, 16])],
)
def test_killed_runs_end_with_the_weights_and_files_of_undisturbed_ones(train, tmp_path, loop, options, kills):
    options |= {"loop": loop, "steps_per_loop": 1}
    ends = []
    for name, calls in (("whole", []), ("killed", kills)):
        files = tmp_path / name
        files.mkdir()
        for call in calls:
            with pytest.raises(Killed):
                train(18, *settled(files, call), **options)
        run = train(18, *settled(files), **options).run
        written = {file.name: file.read_bytes() for file in files.iterdir() if file.suffix != ".h5"}
        ends.append((read_json(run.control / "result.json")["weights_sha256"], written, sorted(files.glob("*.h5"))))
        shutil.rmtree(run.checkpoints)
        run.checkpoints.mkdir()
    assert ends[0][:2] == ends[1][:2]
    assert [file.name for file in ends[0][2]] == [file.name for file in ends[1][2]]


@pytest.mark.extended
@pytest.mark.parametrize("loop", ["custom", "fit"])
def test_a_training_that_a_callback_ended_is_not_resumed(train, loop):
    """A task that dies after its last checkpoint, before it could say so, starts once more."""
    early = {"monitor": "val_loss", "mode": "max", "patience": 1}
    assert EPOCH_ENDS[2] == train(25, keras.callbacks.EarlyStopping(**early), loop=loop).steps
    again = train(25, keras.callbacks.EarlyStopping(**early), loop=loop)
    assert EPOCH_ENDS[2] == again.steps
    assert [] == [name for name, _ in again.recorder.names if name.startswith("batch")]
    assert EPOCH_ENDS[3] == train(30, keras.callbacks.EarlyStopping(**early), loop=loop).steps  # more was asked for


def test_another_configured_rate_replaces_the_one_that_callbacks_have_set(train):
    rates = []

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rates.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))
            self.model.optimizer.learning_rate = rates[-1] / 2

    for end, rate in ((1, 0.1), (2, 0.1), (3, 0.4)):
        train(EPOCH_ENDS[end], Halve(), optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=rate))
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.4])


class Epochs(keras.callbacks.Callback):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.count += 1


def test_each_callback_continues_the_one_of_its_class_and_place_in_the_checkpoint(train, capsys):
    """A checkpoint has the callbacks of the chief; another task may have others."""
    train(EPOCH_ENDS[2], Epochs(0), Epochs(10))
    counts = Epochs(0), Epochs(10), Epochs(20)
    train(EPOCH_ENDS[3], keras.callbacks.TerminateOnNaN(), *counts)
    assert [3, 13, 21] == [each.count for each in counts]
    assert "start with their initial state: Epochs, TerminateOnNaN\n" in capsys.readouterr().out


def test_what_callbacks_do_to_the_weights_at_the_end_is_done_once(train):
    """A task that dies before it could say that it has finished starts once more."""

    class Halve(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    ends = [read_json(train(5, Halve()).run.control / "result.json") for _ in range(2)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]


@pytest.mark.extended
@pytest.mark.parametrize(("loop", "stop_at"), [("custom", 8), ("fit", 7)])
def test_a_stopped_run_reports_no_metrics_of_an_earlier_step_and_keeps_its_weights(train, own_parts, loop, stop_at):
    """Step 8 is that of an evaluation, which the stop comes before; the best weights are not taken by a stop.

    The resumed run makes up for the evaluation.
    """
    options = {"loop": loop, "evaluate_every": 4, "steps_per_loop": 1}
    best = {"monitor": "val_loss", "mode": "max", "patience": 3, "restore_best_weights": True}
    early = keras.callbacks.EarlyStopping(**best)

    def stop(batch: int, logs: Any) -> None:
        if int(early.model.optimizer.iterations) == stop_at - (loop == "custom"):
            own_parts.stop.set()

    stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    run = train(18, early, stops, **options).run
    stopped = read_json(run.control / "result.json")
    assert (stop_at, {}) == (stopped["steps"], stopped["metrics"])
    newest = tf.train.load_checkpoint(str(run.checkpoints / f"ckpt-{stop_at}"))
    names = [name for name, shape in newest.get_variable_to_shape_map().items() if shape in ([2, 1], [1])]
    pairs = itertools.permutations(map(newest.get_tensor, names), 2)
    assert stopped["weights_sha256"] in {hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest() for a, b in pairs}
    own_parts.stop.clear()
    early = keras.callbacks.EarlyStopping(**best)
    train(18, early, stops, **options)
    assert {4, 8, 12, 16, 18} == {row["step"] for row in read_json_lines(run.metrics("chief")) if "eval_loss" in row}


@pytest.mark.extended
def test_other_callbacks_than_those_of_the_checkpoint_start_over(train, capsys):
    train(7, keras.callbacks.TerminateOnNaN())
    early = keras.callbacks.EarlyStopping(monitor="val_loss", mode="max", patience=1)
    assert EPOCH_ENDS[3] == train(25, early).steps
    assert "not in the checkpoint and start with their initial state: EarlyStopping" in capsys.readouterr().out


class Measures(keras.Model):
    """As in Keras's guide: a `train_step` with metrics of the model's own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        features, labels = data
        with tf.GradientTape() as tape:
            outputs = self(features, training=True)
            loss = tf.reduce_mean(outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "largest": tf.reduce_max(tf.abs(labels))}


class Nameless(Measures):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {"d_loss": super().train_step(data)["loss"]}


def test_fit_logs_what_a_train_step_returns(train):
    logs = train(5, loop="fit", model=Measures).recorder.logs("epoch ends")[0]
    assert {"loss", "largest", "val_loss", "val_absolute_error", "val_retrieval_at_1"} == set(logs)
    assert logs["largest"] > 0


def test_a_train_step_without_a_loss_is_refused(train):
    with pytest.raises(UsageError, match="d_loss"):
        train(5, loop="fit", model=Nameless)


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
