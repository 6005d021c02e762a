"""The callbacks that a configuration names, their state in a checkpoint, and the actions that call them.

The attributes of a callback that have changed since it was created are saved, as far as `plain_values.py` can encode
them. Everything else, such as open files, is recreated by each generation, with a warning.
"""

import collections
import contextlib
import hashlib
import io
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
from train.callbacks import plain_values
from train.context import TaskContext
from train.loops.loop import Action, CallProgress, Periodic, Stop
from train.model import optimizers
from train.saving.checkpoint import Encoded
from train.settings import references
from train.telemetry.report import Report


@dataclass
class CallbackProgress:
    """The state of callbacks in a checkpoint."""

    epoch: int = -1
    """Index of the current epoch; -1 before training."""
    steps: int = 0
    """Steps done in this epoch; 0 once `on_epoch_end` has been called."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sum of each logged value over these steps."""
    epoch_logs: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    """Steps done at the newest evaluation."""
    ended_at: int = 0
    """Total steps of the training that a callback ended; 0 if none did."""
    finished_at: int = -1
    """Steps done when `on_train_end` was called at the end; -1 before."""
    rate: float | None = None
    """The configured learning rate; callbacks may have set another one since."""
    callbacks: list[dict[str, bytes]] = field(default_factory=list)
    """The changed attributes of each callback, encoded."""
    classes: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Size of each CSVLogger's file in bytes; -1 for another callback or a missing file."""


class Callbacks(Action):
    """Calls the user's callbacks as `Model.fit` does, from both loops, and saves and restores their state.

    To callbacks, an inner call of the custom loop is one batch of several steps, as with Keras's `steps_per_execution`.
    """

    def __init__(self, context: TaskContext, state: Encoded, report: Report, rate: float | None) -> None:
        """Create the callbacks, once the model is compiled, because they use its optimizer; `rate`: see `Setup`."""
        self._context, self._model, self._state, self.report = context, context.model, state, report
        self._callbacks = build_callbacks(context)
        try:
            with context.strategy.scope():
                self._list = keras.callbacks.CallbackList(
                    self._callbacks,
                    model=self._model,
                    epochs=context.epoch_of(context.total_steps - 1) + 1,
                    steps=context.epoch_end(0),
                    verbose=0,
                )
        except ValueError as error:  # from tf_keras under parameter servers, without batch callbacks
            raise UsageError(f"--callbacks {context.config.callbacks!r}: {error}") from None
        self._made = [plain_values.encode_attributes(callback)[0] for callback in self._callbacks]
        self._lost: set[str] = set()
        encoded = state.encoded.numpy()
        self._progress = CallbackProgress(**plain_values.decode_value(encoded)) if encoded else CallbackProgress()
        if rate is not None and rate != self._progress.rate:  # a resumed run may have another one
            self._model.optimizer.learning_rate = rate
        self._progress.rate = rate
        report.results, report.evaluated_at = self._progress.results, self._progress.evaluated_at
        self.stops = self._progress.ended_at == context.total_steps
        """Whether a callback has requested the end of training."""

    def begin(self, first: int, evaluate: Callable[[], None]) -> None:
        """Begin or resume training after `first` steps; every task calls `evaluate`, which evaluates only if due."""
        restored, epoch = self._progress, self._context.epoch_of(first)
        resumes = restored.epoch >= 0
        within = first < self._context.total_steps and not self.stops and restored.epoch == epoch
        begun = restored.epoch if within or restored.steps else None
        saved, sizes = match_states(self._callbacks, restored)
        known = [callback for callback, state in zip(self._callbacks, saved, strict=True) if state is not None]
        new = [callback for callback, state in zip(self._callbacks, saved, strict=True) if state is None]
        self._model.stop_training = False
        with contextlib.ExitStack() as stack:
            if resumes:  # the state has their effects; these calls only open files and the like
                stack.enter_context(self._same_variables())
                stack.enter_context(continuing_files(self._callbacks, sizes))
            self._list.callbacks = known
            self._list.on_train_begin()
            if begun is not None:
                self._list.on_epoch_begin(begun)
        self._list.callbacks = self._callbacks
        for callback in new:
            callback.on_train_begin({})
            if begun is not None:
                callback.on_epoch_begin(begun, {})
        self._warn("state was not restored", plain_values.restore_attributes(self._callbacks, saved, self._made))
        names = {type(callback).__name__ for callback in new if resumes}
        self._warn("these are not in the checkpoint and start with their initial state:", names, by_all=True)
        self._model.stop_training = False
        self._encoded()
        if restored.steps and not within:  # saved at the end of an epoch, before callbacks were called for it
            evaluate()
            self.end_epoch(first)
        if not within and first < self._context.total_steps and not self.stops:
            self.begin_epoch(first)

    def _warn(self, problem: str, names: Iterable[str], *, by_all: bool = False) -> None:
        """Warn of callbacks or attributes in the chief's log, or in that of every task, as each has separate ones."""
        listed = ", ".join(sorted(names))
        if listed and (by_all or self._context.chief):
            print(f"warning: --callbacks {self._context.config.callbacks}: {problem} {listed}", flush=True)

    @contextlib.contextmanager
    def _same_variables(self) -> Iterator[None]:
        variables = [*self._model.variables, *plain_values.variables_of(self._model.optimizer)]
        before = [_value(variable) for variable in variables]
        yield
        for variable, value in zip(variables, before, strict=True):
            if _value(variable).tobytes() != value.tobytes():
                variable.assign(value)

    def begin_epoch(self, step: int) -> None:
        self._progress.epoch, self._progress.steps, self._progress.sums = self._context.epoch_of(step), 0, {}
        with self._same_layers():
            self._list.on_epoch_begin(self._progress.epoch)
        self._note_stop()

    @contextlib.contextmanager
    def _same_layers(self) -> Iterator[None]:
        """Refuse callbacks that freeze layers between epochs: only a restart would compile the step for that."""
        before = [id(weight) for weight in self._model.trainable_variables]
        yield
        if [id(weight) for weight in self._model.trainable_variables] != before:
            raise UsageError(
                f"--callbacks {self._context.config.callbacks!r} freeze or unfreeze layers between epochs, which "
                "changes nothing once the step is compiled; do it in on_train_begin, or train in two runs by --freeze"
            )

    def before(self, step: int) -> None:
        self._list.on_train_batch_begin(step - self._context.epoch_begin(step))

    def after(self, progress: CallProgress) -> None:
        sums = {name: float(array.sum(dtype=np.float64)) for name, array in progress.result.values.items()}
        self.end_batch(progress.step, len(progress.result.losses), sums)

    def end_batch(self, step: int, count: int, sums: Mapping[str, float]) -> None:
        """End a batch of `count` steps that ends at `step`; `sums` are the sums of the steps' values."""
        self.add(count, sums)
        self._list.on_train_batch_end(step - 1 - self._context.epoch_begin(step - 1), self._logs())
        self._note_stop()

    def add(self, count: int, sums: Mapping[str, float]) -> None:
        self._progress.steps += count
        self._progress.sums = {name: self._progress.sums.get(name, 0.0) + value for name, value in sums.items()}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Call the callbacks before and after an evaluation; some evaluate averages of the weights."""
        self._list.on_test_begin()
        yield
        self._list.on_test_end({name.removeprefix("eval_"): value for name, value in self.report.results.items()})
        self._note_stop()

    def end_epoch(self, step: int) -> None:
        logs = self._logs()
        if self.report.evaluated_at > self._context.epoch_begin(step - 1):  # as with Keras's `validation_freq`
            logs |= {re.sub("^eval_", "val_", name): value for name, value in self.report.results.items()}
        with self._same_layers():
            self._list.on_epoch_end(self._context.epoch_of(step - 1), logs)
        self._progress.epoch_logs = logs
        self._note_stop()
        self._progress.steps, self._progress.sums = 0, {}

    def end(self, step: int, *, stopped: bool) -> bool:
        """End training after `step`: the epoch too, unless it has ended already or the run will be resumed.

        Returns whether callbacks changed the weights after the newest evaluation, such as to the best ones.
        """
        if stopped or self._progress.finished_at == step:  # the checkpoint has these weights
            with self._same_variables():
                self._list.on_train_end(self._progress.epoch_logs)
            return False
        before = self._weights()
        if self._progress.steps:
            self.end_epoch(step)
        self.stops |= step < self._context.total_steps  # callbacks of another task may have ended it
        self._list.on_train_end(self._progress.epoch_logs)
        self._progress.finished_at = step
        return self._weights() != before

    def _weights(self) -> list[bytes]:
        return [hashlib.sha256(_value(variable).tobytes()).digest() for variable in self._model.variables]

    def store_state(self) -> None:
        """Store the state of the callbacks, and the newest evaluation, in the next checkpoint."""
        progress = self._progress
        progress.results, progress.evaluated_at = self.report.results, self.report.evaluated_at
        progress.ended_at = self._context.total_steps if self.stops else 0
        progress.classes = [type(callback).__name__ for callback in self._callbacks]
        progress.callbacks = [
            {name: encoded for name, encoded in now.items() if made.get(name) != encoded}
            for now, made in zip(self._encoded(), self._made, strict=True)
        ]
        progress.sizes = [size_of_file(callback) for callback in self._callbacks]
        self._state.encoded.assign(plain_values.encode_value(vars(progress)))

    def _encoded(self) -> list[dict[str, bytes]]:
        """Return the encoded attributes of each callback; warn once of those that cannot be encoded."""
        encoded, lost = [], set()
        for callback in self._callbacks:
            values, others = plain_values.encode_attributes(callback)
            encoded.append(values)
            lost |= {f"{type(callback).__name__}.{name} ({kind})" for name, kind in others.items()}
        self._warn("a restart does not keep", lost - self._lost)
        self._lost |= lost
        return encoded

    def _note_stop(self) -> None:
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
        with self._callbacks.report.evaluating():
            self._callbacks.end_epoch(progress.step)
            if self._any_stops():
                return Stop.END
            self._callbacks.begin_epoch(progress.step)
        return None


def _value(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))


def match_states(callbacks: Sequence[Any], progress: CallbackProgress) -> tuple[list[Any], list[int]]:
    """Return the attributes of each callback in a checkpoint, None for one that it lacks, and the sizes of their files.

    The n-th callback of a class continues the n-th one in the checkpoint, because its callbacks are those of the chief,
    and other tasks may have others.
    """
    saved = collections.defaultdict(list)
    for kind, *state in zip(progress.classes, progress.callbacks, progress.sizes, strict=True):
        saved[kind].append(state)
    kinds = [type(callback).__name__ for callback in callbacks]
    matched: list[Any] = [saved[kind].pop(0) if saved[kind] else (None, -1) for kind in kinds]
    return [attributes for attributes, _ in matched], [size for _, size in matched]


def size_of_file(callback: Any) -> int:
    """Return the size of a CSVLogger's file; -1 for another callback."""
    path = Path(callback.filename) if isinstance(callback, keras.callbacks.CSVLogger) else None
    return path.stat().st_size if path and path.is_file() else -1


@contextlib.contextmanager
def continuing_files(callbacks: Sequence[Any], sizes: Sequence[int]) -> Iterator[None]:
    """Make each CSVLogger that starts in this context truncate its file to the saved size and append."""
    loggers = [(callback, size) for callback, size in zip(callbacks, sizes, strict=True) if size >= 0]
    before = [callback.append for callback, _ in loggers]
    for callback, size in loggers:
        callback.append = True
        if size_of_file(callback) > size:
            os.truncate(callback.filename, size)
    try:
        yield
        for callback, size in loggers:  # several tasks with one file would each append their rows
            if isinstance(callback.csv_file, io.TextIOWrapper):  # not with tf_keras, where only the chief has callbacks
                callback.csv_file.close()
                callback.csv_file = Path(callback.filename).open("r+")  # noqa: SIM115
                callback.csv_file.seek(min(size, size_of_file(callback)))
    finally:
        for (callback, _), append in zip(loggers, before, strict=True):
            callback.append = append


def build_callbacks(context: TaskContext) -> list[keras.callbacks.Callback]:
    """Return the configured callbacks; raise UsageError unless they are a list of callbacks of the Keras in use."""
    reference = context.config.callbacks
    function = tutorial if reference == "tutorial" else references.load_object("--callbacks", reference)
    callbacks = references.call_user_function("--callbacks", reference, function, context.run.path, context.task.name)
    if not isinstance(callbacks, list) or not all(isinstance(item, keras.callbacks.Callback) for item in callbacks):
        raise UsageError(
            f"--callbacks {reference!r} returned {callbacks!r:.120}; expected a list of "
            f"{keras.callbacks.Callback.__module__.partition('.')[0]} callbacks (use `from tensorflow import keras`)"
        )
    sets = [item for item in callbacks if _chooses_weights(item)]
    if sets and context.config.optimizer.ema_evaluate and optimizers.find_averages(context.model.optimizer):
        raise UsageError(
            f"--callbacks {reference!r}: {type(sets[0]).__name__} chooses weights, and evaluations use the "
            "optimizer's averages instead: add --optimizer.no-ema-evaluate, or leave the callback out"
        )
    backups = [item for item in callbacks if type(item) is keras.callbacks.BackupAndRestore]
    if backups and context.chief:
        print(
            f"--callbacks {reference}: BackupAndRestore is left out, as the run's checkpoints do its work", flush=True
        )
    return [item for item in callbacks if item not in backups]


def _chooses_weights(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback sets the weights that are evaluated, or keeps those of the best evaluation."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_best_only) and callback.monitor.startswith("val_")
    swap = getattr(keras.callbacks, "SwapEMAWeights", ())
    return isinstance(callback, swap) or getattr(callback, "restore_best_weights", False)


def tutorial(run: Path, task: str) -> list[keras.callbacks.Callback]:
    """Return the callbacks of TensorFlow's distributed-training tutorials, separate ones for each task.

    The weights of every epoch go to `callbacks/<task>/` in the run folder. Source:
    https://www.tensorflow.org/tutorials/distribute/keras#define_the_callbacks
    """
    weights = run / "callbacks" / task / "epoch-{epoch:03d}.weights.h5"
    weights.parent.mkdir(parents=True, exist_ok=True)
    return [
        keras.callbacks.TensorBoard(str(run / "tensorboard" / task / "keras"), write_graph=False),
        keras.callbacks.ModelCheckpoint(str(weights), save_weights_only=True),
        keras.callbacks.LearningRateScheduler(_rate_of_epoch, verbose=1),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
    ]


def _rate_of_epoch(epoch: int, _rate: float) -> float:
    if epoch < 3:
        return 1e-3
    return 1e-4 if epoch < 7 else 1e-5
