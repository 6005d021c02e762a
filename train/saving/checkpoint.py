"""Checkpoints of the model, the optimizer and the step, in the run folder that every task shares.

`train/saving/files.py` says what lies there. The newest one that is good for all tasks is restored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import RunFailed
from train.model import initial
from train.saving.files import BEST, Saved, agreed, clean, keep_only, prune, set_aside, write
from train.saving.joint import Joint
from train.saving.mirror import Copy, Mirror


def diverged(what: str) -> RunFailed:
    """Return the error of a training whose numbers are not finite any more, with what to do."""
    return RunFailed(
        f"{what}; lower --optimizer.learning-rate or look at the data, then start again (the checkpoints before it are "
        "kept)"
    )


class Checkpoint:
    """Saves and restores the training state.

    The step is a variable of our own: Keras's `optimizer.iterations` loses updates under asynchronous training.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        step: tf.Variable,
        folder: Path,
        *,
        keep: int,
        writes: bool,
        generation: int = 0,
        saved: Callable[[int], None] = lambda step: None,
        loss_scale: tf.Module | None = None,
        callbacks: tf.Module | None = None,
        best: tf.Module | None = None,
        joint: Joint | None = None,
    ) -> None:
        """Prepare to save.

        Args:
            model: what is trained, built.
            optimizer: what trains it, built.
            step: int64 scalar, the optimizer steps done.
            folder: shared by all tasks.
            keep: newest checkpoints that are kept.
            writes: whether this task writes. The others only take part in reading what is spread over the tasks, which
                can be a collective operation
                (https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl#checkpoint_saving).
            generation: of the run.
            saved: called with each step whose checkpoint is finished, perhaps from another thread.
            loss_scale: of a training in float16. One that has just become that has none in its checkpoints yet.
            callbacks: what callbacks have counted. The same holds of it.
            best: what evaluations have counted. The same holds of it.
            joint: how tasks that each hold a part of the variables write them together.
        """
        self._parts = {"step": step, "model": model, "optimizer": optimizer}
        optional = {"loss_scale": loss_scale, "callbacks": callbacks, "best": best}
        self._optional = {name: part for name, part in optional.items() if part is not None}
        self._checkpoint = tf.train.Checkpoint(**self._parts, **self._optional)
        self._model = model
        self._step = step
        self._folder = folder
        self._keep = keep
        self._writes = writes
        self.generation = generation
        self._saved = saved
        self._joint = joint
        self.writing_s: float | None = None
        """Seconds that writing the last finished one took, beside the training."""
        self._copy: Copy | None = None
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None

    def restore(self, everyones: Callable[[int], Sequence[int]] = lambda step: [step]) -> int:
        """Restore the newest checkpoint that is good for all tasks, if there is one; return the step to go on from.

        Newer ones, which are damaged or which not all can read, are then set aside.

        Args:
            everyones: takes a step and returns those that all tasks gave: a collective operation.
        """
        newest = agreed(self._folder, everyones, lambda words: print(words, flush=True) if self._writes else None)
        if newest is not None:
            held = {name.partition("/")[0] for name, _ in tf.train.list_variables(newest.prefix)}
            also = {name: part for name, part in self._optional.items() if name in held}
            kept = tf.train.Checkpoint(**self._parts, **also)
            if self._joint:
                kept = Mirror(kept, lambda variable: variable if variable.is_initialized() else None).checkpoint
            kept.read(newest.prefix).assert_existing_objects_matched()
        if self._writes:
            set_aside(self._folder, newest.step if newest else -1)
            for folder in (self._folder, self._folder / BEST):
                clean(folder, self.generation)
        return int(self._step.numpy())

    def prepare(self) -> Copy:
        """Return what a save copies to, made by the first call.

        Call outside of the strategy's scope: inside, as in the callbacks of `fit`, its variables would be the
        strategy's, which tasks share, and which cannot hold text.
        """
        if self._copy is None:
            named = [
                (one if isinstance(one, tf.Variable) else one.value, name) for one, name in initial.names(self._model)
            ]
            self._copy = Copy(self._checkpoint, {id(one): initial.checkpoint_name(name) for one, name in named})
        return self._copy

    def save(self, step: int, *, best: bool = False) -> None:
        """Save the state after `step` optimizer steps. Every task calls this at the same step.

        Training may go on at once: what is saved was copied, and is written by a thread.

        Args:
            step: the optimizer steps done.
            best: whether this becomes the one best checkpoint, beside the newest ones.
        """
        self.wait()
        self._step.assign(step)
        self.prepare().update()
        if self._writes or (self._joint and self._joint.writes):
            self._writing = threading.Thread(target=self._write, args=(step, best), name="checkpoint")
            self._writing.start()

    def release(self) -> None:
        """Free the memory of what a save copies to, once nothing is being written any more."""
        self.wait()
        self._copy = None

    @property
    def writing(self) -> bool:
        """Whether one is being written now."""
        return self._writing is not None and self._writing.is_alive()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._error:
            error, self._error = self._error, None
            raise error

    def _write(self, step: int, best: bool) -> None:
        try:
            assert self._copy is not None
            broken, writer = self._copy.not_finite(self._model.trainable_variables), self._copy.checkpoint
            problem = diverged(f"{broken} is not finite after step {step}") if broken else None
            began, folder = time.monotonic(), self._folder / BEST if best else self._folder
            if best:
                folder.mkdir(exist_ok=True)
            saved = Saved(folder, step)
            if self._joint:
                writer = self._joint.save(self._copy, self._folder, self.generation, str(problem or ""))
            if problem:
                raise problem
            if writer is None:
                return
            write(writer, saved, self.generation)
            self.writing_s = time.monotonic() - began
            if best:
                keep_only(saved)
            else:
                prune(saved, self._keep)
                self._saved(step)
        except BaseException as error:  # raised by the next `wait`, in the thread that trains
            self._error = error
