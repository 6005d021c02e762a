"""Checkpoints of the model, the optimizer and the step, in the run folder that all tasks share.

`cluster/contract/recovery/checkpoint_files.py` describes the files. A run resumes from the newest checkpoint that all
tasks can read.
"""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.contract.recovery import checkpoint_files
from cluster.contract.recovery.checkpoint_files import NO_CHECKPOINT, Saved
from cluster.system.errors import RunFailed, UsageError
from train.model import initial_weights
from train.saving.snapshots import Gather, MemorySnapshots
from train.saving.trees import Joint, Mirror, Snapshot, as_saved, parts_of_model, unwrap


def divergence_error(problem: str) -> RunFailed:
    """Return the error of a training with NaN or infinite numbers, with the fix."""
    return RunFailed(
        f"{problem}; lower --optimizer.learning-rate or look at the data, then start again (earlier checkpoints are "
        "kept)"
    )


class Encoded(tf.Module):
    """A variable of the checkpoint that holds encoded state."""

    def __init__(self, name: str) -> None:
        """Call outside the strategy's scope: the variable belongs to this task."""
        super().__init__(name=name)
        with tf.device("CPU:0"):
            self.encoded = tf.Variable(b"", trainable=False, dtype=tf.string)


@dataclass
class CheckpointManager:
    """Saves and restores the training state.

    The step is a separate variable, because Keras's `optimizer.iterations` loses updates in asynchronous training. Only
    a task that `writes` writes to `folder`, which all tasks share; the others help to read distributed variables, which
    can be a collective operation
    (https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl#checkpoint_saving). `saved` is called with
    the step of each finished checkpoint, possibly from another thread. The loss scale of float16 and the callbacks'
    state may be missing in a checkpoint of a run that is resumed with other settings. `joint` is this task's part in
    checkpoints that several tasks write together.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    step: tf.Variable
    folder: Path
    _: KW_ONLY
    keep: int
    writes: bool
    generation: int = 0
    saved: Callable[[int], None] = lambda step: None
    loss_scale: tf.Module | None = None
    callbacks: tf.Module | None = None
    joint: Joint | None = None
    restored_from: str = field(default="", init=False)
    """`memory` or `checkpoint`; empty for a training from the start."""
    writing_s: float | None = field(default=None, init=False)
    """Seconds that writing the last checkpoint took, concurrently with the training."""

    def __post_init__(self) -> None:
        model = parts_of_model(self.model)
        own_optimizers = model.pop("own_optimizers", None)
        optional = {"loss_scale": self.loss_scale, "callbacks": self.callbacks, "own_optimizers": own_optimizers}
        self._parts = {"step": self.step, **model, "optimizer": self.optimizer}
        self._optional = {name: part for name, part in optional.items() if part is not None}
        self.tree = tf.train.Checkpoint(**self._parts, **self._optional)
        self._copy: Snapshot | None = None
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None

    def restore(self, gather: Gather = lambda step: [step], snapshots: MemorySnapshots | None = None) -> int:
        """Restore the newest snapshot or the newest checkpoint that all tasks can read; return the steps done.

        Newer checkpoints, which are damaged or unreadable for some task, are set aside. `gather` is a collective
        operation that collects a number from every task. Raises UsageError if the checkpoint is of another model.
        """
        listed = next((saved.step for saved in checkpoint_files.list_finished(self.folder)), NO_CHECKPOINT)

        @functools.cache
        def agree() -> Saved | None:
            return checkpoint_files.agree_on_newest(
                self.folder, gather, lambda message: print(message, flush=True) if self.writes else None
            )

        def newest_good() -> int:
            try:
                return saved.step if (saved := agree()) else NO_CHECKPOINT
            except RunFailed:  # in all tasks, as some can read no checkpoint; all restore the snapshot
                return NO_CHECKPOINT

        restored = snapshots.restore(listed, newest_good) if snapshots else None
        if restored is not None:
            self.restored_from = "memory"
        elif newest := agree():
            self._read(newest)
            self.restored_from, restored = "checkpoint", newest.step
        if self.writes:
            checkpoint_files.set_aside(self.folder, NO_CHECKPOINT if restored is None else restored)
            checkpoint_files.delete_leftovers(self.folder, self.generation)
        return int(self.step.numpy())

    def _read(self, saved: Saved) -> None:
        saved_parts = {name.partition("/")[0] for name, _ in tf.train.list_variables(saved.prefix)}
        optional = {name: part for name, part in self._optional.items() if name in saved_parts}
        optimizer = as_saved(self.optimizer, saved.prefix)
        checkpoint = tf.train.Checkpoint(**self._parts | optional | {"optimizer": optimizer})
        if self.joint:
            checkpoint = Mirror(checkpoint, lambda variable: variable if variable.is_initialized() else None).checkpoint
        try:
            checkpoint.read(saved.prefix).assert_existing_objects_matched()
        except (AssertionError, ValueError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise UsageError(
                f"the checkpoint of step {saved.step} is that of another model or optimizer: {reason}; undo the change "
                f"of your code, or begin a new run with --init-from {self.folder.parent.name}"
            ) from None

    def prepare(self) -> Snapshot:
        """Return the copy of the variables that a save writes; the first call creates it.

        Call outside the strategy's scope: inside, as in the callbacks of `fit`, the variables would belong to the
        strategy, which shares them between tasks and does not support strings.
        """
        if self._copy is None:
            names = {
                id(unwrap(weight)): initial_weights.checkpoint_name(name)
                for weight, name in initial_weights.list_weights(self.model)
            }
            self._copy = Snapshot(self.tree, names)
        return self._copy

    def save(self, step: int) -> None:
        """Save the state after `step` optimizer steps, at which every task calls this; a thread writes a copy of it."""
        self.wait()
        self.step.assign(step)
        self.prepare().update()
        if self.writes or (self.joint and self.joint.writes):
            self._writing = threading.Thread(target=self._write, args=(step,), name="checkpoint")
            self._writing.start()

    def keep_snapshot(self, step: int, snapshots: MemorySnapshots) -> None:
        """Keep the state after `step` optimizer steps in memory. Every task calls this at the same step."""
        self.step.assign(step)
        snapshots.write(step)

    def release(self) -> None:
        """Wait for the last save, and free the memory of the copy."""
        self.wait()
        self._copy = None

    @property
    def writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def wait(self) -> None:
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._error:
            error, self._error = self._error, None
            raise error

    def _write(self, step: int) -> None:
        try:
            assert self._copy is not None
            broken, write = self._copy.not_finite(self.model.trainable_variables), self._copy.checkpoint.write
            problem = divergence_error(f"{broken} is not finite after step {step}") if broken else None
            began, saved = time.monotonic(), Saved(self.folder, step)
            if self.joint:
                write = self.joint.save(self._copy, self.folder, self.generation, str(problem or ""))
            if problem:
                raise problem
            if write is None:
                return
            checkpoint_files.write_checkpoint(write, saved, self.generation)
            self.writing_s = time.monotonic() - began
            checkpoint_files.delete_older(saved, self.keep)
            self.saved(step)
        except BaseException as error:  # raised by the next `wait`, in the thread that trains
            self._error = error
