"""Keras callbacks: those of TensorFlow's tutorials, and the action that calls any callback from both loops.

Their state is a part of the checkpoint, because a restart must not change when training stops. The attributes of a
callback that have changed since it was created are saved, as far as `plain_values.py` can encode them. Everything else,
such as open files, is created by each generation, and is reported.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.context import TaskContext
from train.loops import plain_values
from train.loops.loop import Action, CallProgress, Periodic, Stop
from train.saving.checkpoint import Encoded
from train.settings import references
from train.telemetry.report import Report

_WITHOUT_STATE = {
    keras.callbacks.CSVLogger: ("append_header", "csv_file", "writer"),
    keras.callbacks.TensorBoard: ("_is_tracing", "_profiler_started", "_batch_trace_context", "_writers"),
}
"""Attributes of Keras's callbacks that belong to a process."""


def build(context: TaskContext) -> list[keras.callbacks.Callback]:
    """Return the callbacks that the configuration names.

    Raises:
        UsageError: there is no such function, or it does not return a list of callbacks of the Keras in use.
    """
    reference = context.config.callbacks
    if not reference:
        return []
    function = tutorial if reference == "tutorial" else references.load("--callbacks", reference)
    callbacks = references.call("--callbacks", reference, function, context.run.path, context.task.name)
    if not isinstance(callbacks, list) or not all(isinstance(item, keras.callbacks.Callback) for item in callbacks):
        raise UsageError(
            f"--callbacks {reference!r} returned {callbacks!r:.120}; expected a list of "
            f"{keras.callbacks.Callback.__module__.partition('.')[0]} callbacks (use `from tensorflow import keras`)"
        )
    swaps = [item for item in callbacks if isinstance(item, getattr(keras.callbacks, "SwapEMAWeights", ()))]
    if swaps and context.config.optimizer.ema and context.config.optimizer.ema_evaluate:
        raise UsageError(
            f"--callbacks {reference!r} has SwapEMAWeights, and --optimizer.ema evaluates by averages already: add "
            "--optimizer.ema-evaluate false, or leave one of them out"
        )
    backups = [item for item in callbacks if type(item) is keras.callbacks.BackupAndRestore]
    if backups and context.chief:
        print(
            f"--callbacks {reference}: BackupAndRestore is left out, as the run's checkpoints do its work", flush=True
        )
    return [item for item in callbacks if item not in backups]


def tutorial(run: Path, task: str) -> list[keras.callbacks.Callback]:
    """Return the callbacks of TensorFlow's distributed-training tutorials.

    Source: https://www.tensorflow.org/tutorials/distribute/keras#define_the_callbacks

    Args:
        run: the run folder. The weights of every epoch go to `callbacks/<task>/`.
        task: the task's name: each task has separate callbacks and folders.
    """
    weights = run / "callbacks" / task / "epoch-{epoch:03d}.weights.h5"
    weights.parent.mkdir(parents=True, exist_ok=True)
    return [
        keras.callbacks.TensorBoard(str(run / "tensorboard" / task / "keras"), write_graph=False),
        keras.callbacks.ModelCheckpoint(str(weights), save_weights_only=True),
        keras.callbacks.LearningRateScheduler(_rate_of_epoch),
        PrintRate(),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
    ]


def _rate_of_epoch(epoch: int, _rate: float) -> float:
    """Return 1e-3 for the first three epochs, 1e-4 for the next four, 1e-5 from there on."""
    if epoch < 3:
        return 1e-3
    return 1e-4 if epoch < 7 else 1e-5


class PrintRate(keras.callbacks.Callback):
    """Prints the learning rate of every epoch."""

    def on_epoch_end(self, epoch: int, _logs: dict[str, float] | None = None) -> None:
        rate = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
        print(f"learning rate of epoch {epoch + 1}: {rate:g}", flush=True)


@dataclass
class CallbackProgress:
    """The state of callbacks in a checkpoint."""

    epoch: int = -1
    """Index of the current epoch; -1 before training."""
    steps: int = 0
    """Steps done in this epoch; 0 once callbacks were called for its end."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sum over those steps of each logged value."""
    epoch_logs: dict[str, float] = field(default_factory=dict)
    """Logs of the newest finished epoch."""
    results: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""
    evaluated_at: int = -1
    """Steps done at the newest evaluation."""
    ended_at: int = 0
    """Total steps of the training that a callback ended; 0 if none did."""
    callbacks: list[dict[str, bytes]] = field(default_factory=list)
    """The changed attributes of each callback, encoded."""
    classes: list[str] = field(default_factory=list)
    """Names of the callbacks' classes."""
    sizes: list[int] = field(default_factory=list)
    """Size of each CSVLogger's file in bytes; -1 for another callback or a missing file."""


class Callbacks(Action):
    """Calls the user's callbacks as `Model.fit` does, from both loops, and saves and restores their state.

    To callbacks, an inner call of the custom loop is one batch of several steps, as with Keras's `steps_per_execution`.
    """

    def __init__(self, context: TaskContext, state: Encoded, report: Report) -> None:
        """Create the callbacks. Call once the model is compiled, because they use its optimizer."""
        self._context, self._model, self._state, self._report = context, context.model, state, report
        self._callbacks = build(context)
        try:
            with context.strategy.scope():
                self._list = keras.callbacks.CallbackList(
                    self._callbacks,
                    model=self._model,
                    epochs=context.num_epochs,
                    steps=context.epoch_end(0),
                    verbose=0,
                )
        except ValueError as error:  # of tf_keras under parameter servers, which knows no batches
            raise UsageError(f"--callbacks {context.config.callbacks!r}: {error}") from None
        self._made = [attributes(callback)[0] for callback in self._callbacks]
        self._lost: set[str] = set()
        encoded = state.encoded.numpy()
        self._progress = CallbackProgress(**plain_values.decode(encoded)) if encoded else CallbackProgress()
        report.results, report.evaluated_at = self._progress.results, self._progress.evaluated_at
        self.stops = self._progress.ended_at == context.total_steps
        """Whether a callback has requested the end of training."""

    def begin(self, first: int, evaluate: Callable[[], None]) -> None:
        """Begin training after `first` steps, or resume it with the state that callbacks had then.

        Args:
            evaluate: evaluates on the test split if that is due; every task calls it.
        """
        restored, epoch = self._progress, self._context.epoch_of(first)
        classes = [type(callback).__name__ for callback in self._callbacks]
        resumes = restored.epoch >= 0 and restored.classes == classes
        within = first < self._context.total_steps and not self.stops and restored.epoch == epoch
        self._model.stop_training = False
        with contextlib.ExitStack() as stack:
            if resumes:  # they have had their effect; these calls only open files and the like
                stack.enter_context(self._same_variables())
                stack.enter_context(appending(self._callbacks, restored.sizes))
            self._list.on_train_begin()
            if within or restored.steps:
                self._list.on_epoch_begin(restored.epoch)
        if resumes:
            self._warn("state was not restored", restore(self._callbacks, restored))
        elif restored.epoch >= 0:
            self._warn("these are not the callbacks of the checkpoint; they start with their initial state", [""])
        self._model.stop_training = False
        self._encoded()
        if restored.steps and not within:  # it was saved at the end of an epoch, before callbacks were called for that
            evaluate()
            self.end_epoch(first)
        if not within and first < self._context.total_steps and not self.stops:
            self.begin_epoch(first)

    def _warn(self, problem: str, attributes: Iterable[str]) -> None:
        names = sorted(attributes)
        if names and self._context.chief:
            print(
                f"warning: --callbacks {self._context.config.callbacks}: {problem} {', '.join(names)}".rstrip(),
                flush=True,
            )

    @contextlib.contextmanager
    def _same_variables(self) -> Iterator[None]:
        """Restore the values of the model's and the optimizer's variables on exit."""
        optimizer = getattr(self._model.optimizer, "variables", ())
        variables = [*self._model.variables, *(optimizer() if callable(optimizer) else optimizer)]
        before = [_value(variable) for variable in variables]
        yield
        for variable, value in zip(variables, before, strict=True):
            if _value(variable).tobytes() != value.tobytes():
                variable.assign(value)

    def begin_epoch(self, step: int) -> None:
        """Begin the epoch of the step after `step`."""
        self._progress.epoch, self._progress.steps, self._progress.sums = self._context.epoch_of(step), 0, {}
        self._list.on_epoch_begin(self._progress.epoch)

    def before(self, step: int) -> None:
        """Begin a batch after `step` steps."""
        self._list.on_train_batch_begin(step - self._context.epoch_begin(step))

    def after(self, progress: CallProgress) -> None:
        """End the batch of a call."""
        values = progress.result.values.items()
        sums = {name: float(array.sum(dtype=np.float64)) for name, array in values}
        self.end_batch(progress.step, len(progress.result.losses), sums)

    def end_batch(self, step: int, count: int, sums: Mapping[str, float]) -> None:
        """End a batch of `count` steps with `step`; `sums` are those of the steps' values."""
        self.add(count, sums)
        self._list.on_train_batch_end(step - 1 - self._context.epoch_begin(step - 1), self._logs())
        self._note_stop()

    def add(self, count: int, sums: Mapping[str, float]) -> None:
        """Add steps of this epoch and the sums of their values."""
        self._progress.steps += count
        self._progress.sums = {name: self._progress.sums.get(name, 0.0) + value for name, value in sums.items()}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Call callbacks before and after an evaluation, such as those that evaluate by averages of the weights."""
        self._list.on_test_begin()
        yield
        self._list.on_test_end({name.removeprefix("eval_"): value for name, value in self._report.results.items()})

    def end_epoch(self, step: int) -> None:
        """End the epoch of `step`."""
        logs = self._logs() | {re.sub("^eval_", "val_", name): value for name, value in self._report.results.items()}
        self._list.on_epoch_end(self._context.epoch_of(step - 1), logs)
        self._progress.epoch_logs = logs
        self._note_stop()
        self._progress.steps, self._progress.sums = 0, {}

    def end(self, step: int, *, stopped: bool) -> bool:
        """End training after `step`: the epoch too, unless it has ended already or the run will be resumed.

        Returns:
            Whether callbacks changed the weights after the newest evaluation, such as to the best ones.
        """
        if stopped:  # the next generation continues from the checkpoint, which has these weights
            with self._same_variables():
                self._list.on_train_end(self._progress.epoch_logs)
            return False
        before = self._weights()
        if self._progress.steps:
            self.end_epoch(step)
        self.stops |= step < self._context.total_steps  # callbacks of another task may have ended it
        self._list.on_train_end(self._progress.epoch_logs)
        return self._weights() != before

    def _weights(self) -> list[bytes]:
        return [hashlib.sha256(_value(variable).tobytes()).digest() for variable in self._model.variables]

    def keep(self) -> None:
        """Store the state of the callbacks, and the newest evaluation, in the next checkpoint."""
        progress = self._progress
        progress.results, progress.evaluated_at = self._report.results, self._report.evaluated_at
        progress.ended_at = self._context.total_steps if self.stops else 0
        progress.classes = [type(callback).__name__ for callback in self._callbacks]
        progress.callbacks = [
            {name: encoded for name, encoded in now.items() if made.get(name) != encoded}
            for now, made in zip(self._encoded(), self._made, strict=True)
        ]
        progress.sizes = [size_of(callback) for callback in self._callbacks]
        self._state.encoded.assign(plain_values.encode(vars(progress)))

    def _encoded(self) -> list[dict[str, bytes]]:
        """Return the encoded attributes of each callback; warn once of those that cannot be encoded."""
        encoded, lost = [], set()
        for callback in self._callbacks:
            values, others = attributes(callback)
            encoded.append(values)
            lost |= {f"{type(callback).__name__}.{name} ({kind})" for name, kind in others.items()}
        self._warn("a restart does not keep", lost - self._lost)
        self._lost |= lost
        return encoded

    def _note_stop(self) -> None:
        """Record that a callback ends the training, which all tasks then end together."""
        self.stops |= bool(self._model.stop_training)
        self._model.stop_training = False

    def _logs(self) -> dict[str, float]:
        steps = self._progress.steps
        return {name: total / steps for name, total in self._progress.sums.items()} if steps else {}


class CallEpochs(Periodic):
    """Calls the user's callbacks between two epochs."""

    def __init__(self, context: TaskContext, callbacks: Callbacks, any_stops: Callable[[], bool]) -> None:
        """`any_stops`: whether callbacks of any task end the training."""
        super().__init__(context.epoch_end)
        self._callbacks, self._any_stops = callbacks, any_stops

    def after(self, progress: CallProgress) -> Stop | None:
        if not self.due(progress):
            return None
        self._callbacks.end_epoch(progress.step)
        if self._any_stops():
            return Stop.END
        self._callbacks.begin_epoch(progress.step)
        return None


def _value(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))


def attributes(callback: Any) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the encoded attributes of a callback, and the types of those that cannot be encoded."""
    encoded, lost = {}, {}
    skipped = {name for kind, names in _WITHOUT_STATE.items() if isinstance(callback, kind) for name in names}
    for name, value in plain_values.attributes_of(callback).items():
        if name in skipped:
            continue
        try:
            encoded[name] = plain_values.encode(value, in_place=True)
        except (TypeError, RecursionError):
            lost[name] = type(value).__name__
    return encoded, lost


def restore(callbacks: Sequence[Any], progress: CallbackProgress) -> list[str]:
    """Restore the attributes of callbacks; return the names of those that could not be restored."""
    lost = []
    for callback, values in zip(callbacks, progress.callbacks, strict=True):
        for name, encoded in values.items():
            try:
                setattr(callback, name, plain_values.decode(encoded, getattr(callback, name, None)))
            except ValueError:
                lost.append(f"{type(callback).__name__}.{name}")
    return lost


def size_of(callback: Any) -> int:
    """Return the size of a CSVLogger's file; -1 for another callback."""
    path = Path(callback.filename) if isinstance(callback, keras.callbacks.CSVLogger) else None
    return path.stat().st_size if path and path.is_file() else -1


@contextlib.contextmanager
def appending(callbacks: Sequence[Any], sizes: Sequence[int]) -> Iterator[None]:
    """Make each CSVLogger that is opened inside truncate its file to the saved size and append to it."""
    loggers = [(callback, size) for callback, size in zip(callbacks, sizes, strict=False) if size >= 0]
    before = [callback.append for callback, _ in loggers]
    for callback, size in loggers:
        callback.append = True
        if size_of(callback) > size:
            os.truncate(callback.filename, size)
    try:
        yield
    finally:
        for (callback, _), append in zip(loggers, before, strict=True):
            callback.append = append
