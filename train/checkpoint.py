"""Checkpoints of the model, the optimizer and the step, in the run folder that every task shares."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import tensorflow as tf


class Checkpoint:
    """Saves and restores the training state.

    The step is a variable of our own: Keras's `optimizer.iterations` loses updates under asynchronous training.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        step: tf.Variable,
        directory: Path,
        *,
        keep: int,
        writes: bool,
    ) -> None:
        """Make the manager.

        Args:
            model: what is trained, built.
            optimizer: what trains it, built.
            step: int64 scalar, the optimizer steps done.
            directory: the shared folder.
            keep: newest checkpoints that are kept.
            writes: whether this task writes to the shared folder. The others save too, to a folder of their own that
                nobody reads, because saving can be a collective operation
                (https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl#checkpoint_saving).
        """
        self._checkpoint = tf.train.Checkpoint(step=step, model=model, optimizer=optimizer)
        self._shared = directory
        self._scratch = None if writes else tempfile.TemporaryDirectory(prefix="checkpoint-")
        own = directory if self._scratch is None else Path(self._scratch.name)
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(own), max_to_keep=keep)
        self._step = step

    def restore(self) -> int:
        """Restore the newest checkpoint, if there is one; return the step to go on from."""
        path = tf.train.latest_checkpoint(str(self._shared))
        if path is not None:
            self._checkpoint.restore(path).assert_existing_objects_matched()
        return int(self._step.numpy())

    def save(self, step: int) -> None:
        """Save the state after `step` optimizer steps. Every task calls this at the same step."""
        self._step.assign(step)
        self._manager.save(checkpoint_number=step)


def newest(directory: Path) -> tuple[str, int] | None:
    """Return the newest checkpoint's path prefix and step, or None where there is none yet."""
    path = tf.train.latest_checkpoint(str(directory))
    return None if path is None else (path, int(path.rpartition("-")[2]))
