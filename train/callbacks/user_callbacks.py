"""The callbacks that a configuration names: those of TensorFlow's tutorials, or the user's."""

from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.context import TaskContext
from train.settings import references


def build_callbacks(context: TaskContext) -> list[keras.callbacks.Callback]:
    """Return the configured callbacks; raise UsageError unless they are a list of callbacks of the Keras in use."""
    reference = context.config.callbacks
    if not reference:
        return []
    function = tutorial if reference == "tutorial" else references.load_object("--callbacks", reference)
    callbacks = references.call_user_function("--callbacks", reference, function, context.run.path, context.task.name)
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
    """Return the callbacks of TensorFlow's distributed-training tutorials, separate ones for each task.

    The weights of every epoch go to `callbacks/<task>/` in the run folder. Source:
    https://www.tensorflow.org/tutorials/distribute/keras#define_the_callbacks
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
