"""Keras callbacks: those of TensorFlow's tutorials, and the hooks that call any callback from the custom loop."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.context import TaskContext
from train.loops.callback_state import CallbackState, appending, attributes, restore, size_of
from train.loops.outer import Inner
from train.loops.steps import LoopResult
from train.settings import references


def build(context: TaskContext) -> list[keras.callbacks.Callback]:
    """Return the callbacks that the configuration names.

    Raises:
        UsageError: there is no such function, or it does not return a list of callbacks of the Keras in use.
    """
    reference = context.config.callbacks
    if not reference:
        return []
    function = CALLBACKS[reference] if reference in CALLBACKS else references.load("--callbacks", reference)
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


CALLBACKS: dict[str, Callable[[Path, str], list[keras.callbacks.Callback]]] = {"tutorial": tutorial}


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


class Hooks:
    """Calls the user's callbacks as `Model.fit` does, from both loops, and saves and restores their state.

    To callbacks, an inner call of the custom loop is one batch of several steps, as with Keras's `steps_per_execution`.
    """

    def __init__(self, context: TaskContext, state: CallbackState) -> None:
        """Create the callbacks. Call once the model is compiled, because they use its optimizer."""
        self._context, self._model, self._state = context, context.model, state
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
        self._progress = state.read()
        self.results, self.evaluated_at = self._progress.results, self._progress.evaluated_at
        """The newest evaluation in the restored checkpoint, and the steps done at it."""
        self.enough = self._progress.ended_at == context.total_steps
        """Whether a callback has requested the end of training."""

    def begin(self, first: int, newest: Callable[[], dict[str, float]]) -> None:
        """Begin training after `first` steps, or resume it with the state that callbacks had then.

        Args:
            newest: evaluates if that is due and returns the newest results on the test split; every task calls it.
        """
        restored, epoch = self._progress, self._context.epoch_of(first)
        classes = [type(callback).__name__ for callback in self._callbacks]
        resumes = restored.epoch >= 0 and restored.classes == classes
        within = first < self._context.total_steps and not self.enough and restored.epoch == epoch
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
            self.end_epoch(first, newest())
        if not within and first < self._context.total_steps and not self.enough:
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

    def begin_batch(self, step: int) -> None:
        """Begin a batch after `step` steps."""
        self._list.on_train_batch_begin(step - self._context.epoch_begin(step))

    def end_batch(self, step: int, count: int, sums: Mapping[str, float]) -> None:
        """End a batch of `count` steps with `step`."""
        self.add(count, sums)
        self._list.on_train_batch_end(step - 1 - self._context.epoch_begin(step - 1), self._logs())
        self._note_stop()

    def add(self, count: int, sums: Mapping[str, float]) -> None:
        """Add steps of this epoch and the sums of their values."""
        self._progress.steps += count
        self._progress.sums = {name: self._progress.sums.get(name, 0.0) + value for name, value in sums.items()}

    def around(self, inner: Inner) -> Inner:
        """Wrap the inner loop so that it calls the callbacks."""

        def hooked(first: int, count: int, stop: bool) -> LoopResult:
            self.begin_batch(first)
            result = inner(first, count, stop)
            values = {"loss": result.losses, self._context.objective.score_name: result.scores}
            sums = {name: float(array.sum(dtype=np.float64)) for name, array in values.items()}
            self.end_batch(first + count, len(result.losses), sums)
            return result

        return hooked

    @contextlib.contextmanager
    def evaluating(self, results: Callable[[], dict[str, float]]) -> Iterator[None]:
        """Call callbacks before and after an evaluation, such as those that evaluate by averages of the weights."""
        self._list.on_test_begin()
        yield
        self._list.on_test_end({name.removeprefix("eval_"): value for name, value in results().items()})

    def end_epoch(self, step: int, results: Mapping[str, float]) -> None:
        """End the epoch of `step`; `results` are the newest on the test split."""
        logs = self._logs() | {re.sub("^eval_", "val_", name): value for name, value in results.items()}
        self._list.on_epoch_end(self._context.epoch_of(step - 1), logs)
        self._progress.epoch_logs = logs
        self._note_stop()
        self._progress.steps, self._progress.sums = 0, {}

    def end(self, step: int, results: Mapping[str, float], *, stopped: bool) -> bool:
        """End training after `step`: the epoch too, unless it has ended already or the run will be resumed.

        Returns:
            Whether callbacks changed the weights after `results`, such as to the best ones.
        """
        if stopped:  # the next generation continues from the checkpoint, which has these weights
            with self._same_variables():
                self._list.on_train_end(self._progress.epoch_logs)
            return False
        before = self._weights()
        if self._progress.steps:
            self.end_epoch(step, results)
        self._list.on_train_end(self._progress.epoch_logs)
        return self._weights() != before

    def _weights(self) -> list[bytes]:
        return [hashlib.sha256(_value(variable).tobytes()).digest() for variable in self._model.variables]

    def keep(self, results: dict[str, float], evaluated_at: int) -> None:
        """Store the state of the callbacks, and the newest evaluation, in the next checkpoint."""
        progress = self._progress
        progress.results, progress.evaluated_at = results, evaluated_at
        progress.ended_at = self._context.total_steps if self.enough else 0
        progress.classes = [type(callback).__name__ for callback in self._callbacks]
        progress.callbacks = [
            {name: encoded for name, encoded in now.items() if made.get(name) != encoded}
            for now, made in zip(self._encoded(), self._made, strict=True)
        ]
        progress.sizes = [size_of(callback) for callback in self._callbacks]
        self._state.write(progress)

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
        self.enough |= bool(self._model.stop_training)
        self._model.stop_training = False

    def _logs(self) -> dict[str, float]:
        steps = self._progress.steps
        return {name: total / steps for name, total in self._progress.sums.items()} if steps else {}


def _value(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))
