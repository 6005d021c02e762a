"""Runs with callbacks that are killed, stopped or resumed."""

import collections
import dataclasses
import hashlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.json_files import read_json, read_json_lines
from tests.support.callback_training import CONFIG, EPOCH_ENDS, Killed
from train.config import Optimizer


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


def test_the_evaluation_that_a_stop_came_before_is_made_up_for_once(train, own_parts):
    own_parts.stop.set()
    run = train(3, callbacks="", evaluate_every=1).run  # one step
    own_parts.stop.clear()
    results = []
    for end in (3, 5, 5):
        train(end, callbacks="", evaluate_every=1)
        results.append(read_json(run.control / "result.json")["metrics"])
    assert results[0] != results[1] == results[2]  # a finished run that is resumed keeps its results
    assert [1, 2, 3, 4, 5] == [row["step"] for row in read_json_lines(run.metrics("chief")) if "eval_loss" in row]


def test_the_rate_of_a_changed_optimizer_function_is_reported_as_ignored(train, own_parts, capsys):
    for end, rate in ((1, 0.1), (2, 0.1), (3, 0.4)):
        own_parts.optimizer = lambda _rate, own=rate: keras.optimizers.SGD(own)
        train(end, callbacks="", optimizer=Optimizer("own_parts:optimizer"))
        assert ("is the checkpoint's, 0.1, not the 0.4" in capsys.readouterr().out) == (rate == 0.4)


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


def test_what_callbacks_do_to_the_weights_at_the_end_is_done_once(train, tmp_path):
    """A task that dies before it could say that it has finished starts once more."""

    class Halve(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    def end() -> Any:
        run = train(5, Halve(), keras.callbacks.TensorBoard(tmp_path)).run
        return read_json(run.control / "result.json")["weights_sha256"]

    assert end() == end()


@pytest.mark.extended
@pytest.mark.parametrize(("loop", "stop_at"), [("custom", 8), ("fit", 7)])
def test_a_stopped_run_reports_no_metrics_of_an_earlier_step_and_keeps_its_weights(train, own_parts, loop, stop_at):
    """Step 8 is that of an evaluation, which the resumed run makes up for; a stop does not take the best weights."""
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
