"""Keras callbacks: those of TensorFlow's tutorials, and what calls any of them from the custom loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.errors import UsageError
from train.context import TaskContext
from train.loops.callback_state import CallbackState, Progress, attributes, changed, restore
from train.loops.outer import Inner
from train.loops.steps import LoopResult
from train.settings import references


def build(context: TaskContext) -> list[keras.callbacks.Callback]:
    """Return the callbacks that the configuration names; none where it names none.

    Raises:
        UsageError: there is no such function, or it does not return a list of callbacks of the Keras in use.
    """
    reference = context.config.callbacks
    if not reference:
        return []
    function = CALLBACKS[reference] if reference in CALLBACKS else references.load("--callbacks", reference)
    made = references.call("--callbacks", reference, function, context.run.path, context.task.name)
    if not isinstance(made, list) or not all(isinstance(one, keras.callbacks.Callback) for one in made):
        raise UsageError(
            f"--callbacks {reference!r} returned {made!r:.120}; expected a list of "
            f"{keras.callbacks.Callback.__module__.partition('.')[0]} callbacks (use `from tensorflow import keras`)"
        )
    return made


def tutorial(run: Path, task: str) -> list[keras.callbacks.Callback]:
    """Return the callbacks of TensorFlow's distributed-training tutorials.

    Source: https://www.tensorflow.org/tutorials/distribute/keras#define_the_callbacks

    Args:
        run: the run folder. The weights of every epoch go to `callbacks/<task>/`.
        task: the task's name: each has its own callbacks, and writes to places of its own.
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


CALLBACKS: dict[str, Callable[[Path, str], list[keras.callbacks.Callback]]] = {"tutorial": tutorial}


def _rate_of_epoch(epoch: int, _rate: float) -> float:
    """Return 1e-3 for the first three epochs, 1e-4 for the next four, 1e-5 from there on."""
    if epoch < 3:
        return 1e-3
    return 1e-4 if epoch < 7 else 1e-5


class PrintRate(keras.callbacks.Callback):
    """Prints the learning rate of every epoch."""

    def on_epoch_end(self, epoch: int, _logs: dict[str, float] | None = None) -> None:
        """Print it."""
        rate = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
        print(f"learning rate of epoch {epoch + 1}: {rate:g}", flush=True)


class Hooks:
    """Calls the user's callbacks as `Model.fit` does, from both loops, and saves and restores what they have counted.

    An inner call of the custom loop is one batch of several steps to them, as with Keras's own `steps_per_execution`.
    """

    def __init__(self, context: TaskContext, state: CallbackState) -> None:
        """Make the callbacks. Call once the model is compiled: they ask it for its optimizer.

        Args:
            context: of this task.
            state: of the checkpoint that was restored.

        Raises:
            UsageError: there are no such callbacks, or this strategy does not allow them.
        """
        self._context, self._model, self._state = context, context.model, state
        self._score_name = context.objective.score_name
        self._callbacks = build(context)
        self._made = [attributes(callback) for callback in self._callbacks]
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
        self._progress = state.read()
        self._epoch_logs: dict[str, float] = {}
        self.enough = self._progress.ended_at == context.total_steps
        """Whether a callback has requested the end of training."""

    def begin(self, first: int, evaluate: Callable[[int], dict[str, float]]) -> None:
        """Training begins after `first` steps, or goes on with what callbacks had counted by then.

        Args:
            first: steps done before.
            evaluate: returns the results on the test split; every task calls it where one does.
        """
        self._model.stop_training = False
        self._list.on_train_begin()
        restored, epoch = self._progress, self._context.epoch_of(first)
        begun = restored.epoch == epoch
        if not begun:
            self._restore(restored)
            if restored.sums[0]:  # it was saved at the end of an epoch, before callbacks were called for that
                self.end_epoch(first, evaluate(first))
        if first < self._context.total_steps and not self.enough:
            self.begin_epoch(first)
        if begun:  # in the previous generation, so that what was saved holds what callbacks did then
            self._restore(restored)
            self._progress.sums = restored.sums

    def _restore(self, progress: Progress) -> None:
        if progress.epoch >= 0 and not restore(self._callbacks, progress) and self._context.chief:
            print("warning: these are not the callbacks of the checkpoint, and begin anew", flush=True)

    def begin_epoch(self, step: int) -> None:
        """The epoch of the step after `step` begins, or goes on after a resume."""
        self._progress = Progress(epoch=self._context.epoch_of(step))
        self._list.on_epoch_begin(self._progress.epoch)

    def begin_batch(self, step: int) -> None:
        """A batch begins after `step` steps."""
        self._list.on_train_batch_begin(step - self._context.epoch_begin(step))

    def end_batch(self, step: int, count: int, loss_sum: float, score_sum: float) -> None:
        """A batch of `count` steps has ended with `step`."""
        self.add(count, loss_sum, score_sum)
        self._list.on_train_batch_end(step - 1 - self._context.epoch_begin(step - 1), self._logs())
        self._note_stop()

    def add(self, count: int, loss_sum: float, score_sum: float) -> None:
        """Count steps of this epoch."""
        self._progress.sums = [
            old + new for old, new in zip(self._progress.sums, (count, loss_sum, score_sum), strict=True)
        ]

    def around(self, inner: Inner) -> Inner:
        """Return the custom loop's inner one with its callbacks."""

        def hooked(first: int, count: int, stop: bool) -> LoopResult:
            self.begin_batch(first)
            result = inner(first, count, stop)
            sums = (float(values.sum(dtype=np.float64)) for values in (result.losses, result.scores))
            self.end_batch(first + count, len(result.losses), *sums)
            return result

        return hooked

    def end_epoch(self, step: int, results: dict[str, float]) -> None:
        """The epoch of `step` ends; `results` are the newest on the test split."""
        logs = self._logs() | {re.sub("^eval_", "val_", name): value for name, value in results.items()}
        self._list.on_epoch_end(self._context.epoch_of(step - 1), logs)
        self._epoch_logs = logs
        self._note_stop()
        self._progress.sums = [0.0, 0.0, 0.0]

    def end(self, step: int, results: dict[str, float], *, stopped: bool) -> None:
        """Training ends after `step`: the epoch too, unless it has ended already or will be gone on with."""
        if self._progress.sums[0] and not stopped:
            self.end_epoch(step, results)
        self._list.on_train_end(self._epoch_logs)

    def keep(self) -> None:
        """Store the state of the callbacks in the next checkpoint."""
        self._progress.ended_at = self._context.total_steps if self.enough else 0
        self._progress.classes = [type(callback).__name__ for callback in self._callbacks]
        pairs = zip(self._callbacks, self._made, strict=True)
        self._progress.callbacks = [changed(callback, made) for callback, made in pairs]
        self._state.write(self._progress)

    def _note_stop(self) -> None:
        """Note that a callback ends the training: all tasks end it together, not Keras at once."""
        self.enough |= bool(self._model.stop_training)
        self._model.stop_training = False

    def _logs(self) -> dict[str, float]:
        steps, losses, scores = self._progress.sums
        return {"loss": losses / steps, self._score_name: scores / steps} if steps else {}
