"""Keras callbacks: those of TensorFlow's tutorials, and what calls any of them from the custom loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.errors import UsageError
from train import references
from train.assignment import Assignment
from train.loops import Inner
from train.steps import LoopResult


def build(assignment: Assignment) -> list[keras.callbacks.Callback]:
    """Return the callbacks that the configuration names; none where it names none.

    Raises:
        UsageError: there is no such function, or it does not return a list of callbacks of the Keras in use.
    """
    reference = assignment.config.callbacks
    if not reference:
        return []
    function = CALLBACKS[reference] if reference in CALLBACKS else references.load("--callbacks", reference)
    made = references.call("--callbacks", reference, function, assignment.run.path, assignment.task.name)
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
    """Calls Keras callbacks from the custom loop as `Model.fit` does.

    An inner call is one batch of several steps to them, as with Keras's own `steps_per_execution`.
    """

    def __init__(self, assignment: Assignment, optimizer: keras.optimizers.Optimizer) -> None:
        self._model = assignment.model
        self._epoch_steps = assignment.epoch_steps
        self._score_name = assignment.objective.score_name
        with assignment.strategy.scope():
            self._model.compile(optimizer=optimizer, jit_compile=False)  # callbacks ask the model for its optimizer
        self._list = keras.callbacks.CallbackList(
            build(assignment),
            model=self._model,
            epochs=-(-assignment.total_steps // self._epoch_steps),
            steps=self._epoch_steps,
            verbose=0,
        )
        self._sums_3 = np.zeros(3)
        self._epoch_logs: dict[str, float] = {}
        self.enough = False
        """Whether a callback wants training to end."""

    def begin(self, first: int) -> None:
        """Training begins after `first` steps."""
        self._model.stop_training = False
        self._list.on_train_begin()
        self.begin_epoch(first)

    def begin_epoch(self, step: int) -> None:
        """The epoch of the step after `step` begins, or goes on after a resume."""
        self._sums_3[:] = 0
        self._list.on_epoch_begin(step // self._epoch_steps)

    def around(self, inner: Inner) -> Inner:
        """Return the inner loop with its callbacks."""

        def hooked(first: int, count: int, stop: bool) -> LoopResult:
            self._list.on_train_batch_begin(first % self._epoch_steps)
            result = inner(first, count, stop)
            self._sums_3 += (len(result.losses), result.losses.sum(), result.scores.sum())
            self._list.on_train_batch_end((first + count - 1) % self._epoch_steps, self._logs())
            self.enough |= bool(self._model.stop_training)
            return result

        return hooked

    def end_epoch(self, step: int, results: dict[str, float]) -> None:
        """The epoch of `step` ends; `results` are the newest on the test split."""
        logs = self._logs() | {name.replace("eval_", "val_"): value for name, value in results.items()}
        self._list.on_epoch_end((step - 1) // self._epoch_steps, logs)
        self._epoch_logs = logs
        self.enough |= bool(self._model.stop_training)
        self._sums_3[:] = 0

    def end(self, step: int, results: dict[str, float], *, stopped: bool) -> None:
        """Training ends after `step`: the epoch too, unless it was told already or will be gone on with."""
        if self._sums_3[0] and not stopped:
            self.end_epoch(step, results)
        self._list.on_train_end(self._epoch_logs)

    def _logs(self) -> dict[str, float]:
        steps, losses, scores = self._sums_3
        return {"loss": losses / steps, self._score_name: scores / steps} if steps else {}
