"""`--loop fit`: Keras's `Model.fit`, with the same data order, checkpoints, evaluation and report as the custom loop.

It is Keras 3's where that works, otherwise tf_keras's; which of them `tf.keras` is was decided before TensorFlow was
imported (`train/__main__.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.spec import Role
from cluster.step_record import StepRecord
from train import callbacks, descent, guards, loops, parameter_server, steps, trace
from train.assignment import Assignment
from train.data.memory import Batch
from train.export import is_legacy
from train.pace import Times
from train.report import Report
from train.sources import share_of


class Training:
    """One life's training by `Model.fit`, from the newest checkpoint to the end or to a stop."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        model, objective = assignment.model, assignment.objective
        with assignment.strategy.scope():
            if not is_legacy():
                guards.synchronize_batch_normalization(model, assignment.strategy.num_replicas_in_sync)
        optimizer = assignment.new_optimizer()
        self._checkpoint = assignment.new_checkpoint(optimizer)
        self._first = self._checkpoint.restore()
        if not assignment.asynchronous:
            steps.check_same_step(assignment.strategy, self._first)
        self._report = Report(assignment, self._first, descent.loss_scale(optimizer))
        with assignment.strategy.scope():
            score = keras.metrics.MeanMetricWrapper(
                lambda labels, outputs: objective.score(_labels(assignment, labels), steps.full_precision(outputs)),
                objective.score_name,
            )
            if not is_legacy():
                _draw_by_place(model, optimizer)
            # XLA over collectives on CPU crashes the process.
            model.compile(optimizer, _Loss(assignment), weighted_metrics=[score], jit_compile=False)
            model.optimizer = optimizer  # not in Keras's own loss scaling: `train/descent.py` says why

    def run(self) -> None:
        """Train, and end well."""
        assignment, total = self._assignment, self._assignment.total_steps
        follower = _Follower(assignment, self._report, self._checkpoint, self._first)
        users = callbacks.build(assignment)
        # Under parameter servers Keras calls back at the end of an epoch alone, so without callbacks of the user's own,
        # which count in epochs, an epoch is as short as an inner loop.
        short = assignment.asynchronous and not users
        epoch_steps = min(assignment.epoch_steps, assignment.config.steps_per_loop if short else total)
        while follower.step < total and not follower.ended:
            done = follower.step % epoch_steps
            # Only whole epochs can be fitted in one call: the rest of an epoch first, after a resume in its middle, and
            # what the last one has left.
            whole = 0 if done else (total - follower.step) // epoch_steps
            count = epoch_steps if whole else min(epoch_steps - done, total - follower.step)
            epoch = follower.step // epoch_steps
            assignment.model.fit(
                _data(assignment, follower.step),
                initial_epoch=epoch,
                epochs=epoch + max(whole, 1),
                steps_per_epoch=count,
                callbacks=[follower, *users],
                shuffle=False,  # the data is in its order already
                verbose=0,
            )
        self._end(follower)

    def _end(self, follower: _Follower) -> None:
        stopped = follower.stopped
        if follower.saved_at != follower.step:
            follower.save()
        self._checkpoint.wait()
        if not stopped and follower.evaluated_at != follower.step:
            follower.evaluate()
        self._report.end(follower.step, stopped=stopped)


def _draw_by_place(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Have random layers draw as in the custom loop, see `guards.random_place`."""
    train_step = model.train_step

    def placed(data: Any) -> Any:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        with guards.random_place(tf.cast(optimizer.iterations, tf.int64), replica):
            return train_step(data)

    model.train_step = placed


class _Follower(keras.callbacks.Callback):
    """Does between two batches what the custom loop does between two inner calls.

    It is the first of all callbacks, so that the others find the results of the evaluation in their logs.
    """

    def __init__(self, assignment: Assignment, report: Report, checkpoint: Any, first: int) -> None:
        super().__init__()
        self._assignment = assignment
        self._report = report
        self._checkpoint = checkpoint
        self._evaluation = assignment.new_evaluation()
        self._save_timer = loops.SaveTimer(assignment.config.checkpoint_seconds if assignment.chief else 0)
        self._agree: Callable[[steps.Signals], steps.Signals] = lambda signals: signals
        # tf_keras adds up over all replicas what it logs (its `reduce_per_replica`), means too.
        self._log_sums = assignment.strategy.num_replicas_in_sync if is_legacy() and not assignment.asynchronous else 1
        self.step = first
        self.ended = False
        """Whether training ends before its last step."""
        self.stopped = False
        """Whether that is because the task was asked to stop."""
        self.saved_at = self.evaluated_at = -1
        self._first = first
        self._told_step = first
        self._in_epoch = 0
        self._sums_2 = np.zeros(2)
        self._told_at = self._batch_at = time.perf_counter()
        self._batch_s: list[float] = []
        self._tracer = trace.Tracer(assignment.run, assignment.task.name)
        generation = assignment.heartbeat.values["generation"]
        workers = assignment.spec.of(Role.WORKER) if assignment.asynchronous else ()
        self._workers = [StepRecord(assignment.run, worker.name, generation) for worker in workers]
        if not assignment.asynchronous:
            self._agree = steps.agreement(assignment.strategy)
            # Under parameter servers Keras refuses callbacks that have this method at all.
            self.on_train_batch_begin = self._on_batch_begin
            self.on_train_batch_end = self._on_batch_end

    def on_epoch_begin(self, _epoch: int, _logs: Any = None) -> None:
        """Keras's running means begin anew."""
        self._in_epoch = 0
        self._sums_2 = np.zeros(2)

    def _on_batch_begin(self, *_batch: int, **_logs: Any) -> None:
        self._tracer.before(self.step, compiles=self.step == self._first)
        self._batch_at = time.perf_counter()

    def _on_batch_end(self, _batch: int, logs: dict[str, float] | None = None) -> None:
        self._batch_s.append(time.perf_counter() - self._batch_at)
        config = self._assignment.config
        self._correct(logs)
        self.step += 1
        self._in_epoch += 1
        self._report.done(self.step)
        self._tracer.after(self.step)
        last = self.step == self._assignment.total_steps
        if self.step % config.log_every == 0 or last or self.step == self._first + 1:
            self._tell(logs)
        if not last:
            if self.step % config.steps_per_loop == 0:
                self._heed_signals()
            self._save_by_steps(self.step - 1)
        if not last and config.evaluate_every and self.step % config.evaluate_every == 0:
            self.evaluate()

    def on_epoch_end(self, _epoch: int, logs: dict[str, float] | None = None) -> None:
        """Evaluate and save, and let the other callbacks know the results."""
        config = self._assignment.config
        self._correct(logs)
        if self._assignment.asynchronous:
            self._in_epoch = self.params["steps"]
            before, self.step = self.step, self.step + self.params["steps"]
            self._report.done(self.step)
            self._record_work()
            self._tell(logs)
            self._heed_signals()
            self._save_by_steps(before)
        whole_epoch = self.step % self._assignment.epoch_steps == 0
        if not self.stopped and not config.evaluate_every and whole_epoch:
            self.evaluate()
            assert logs is not None
            logs |= {name.replace("eval_", "val_"): value for name, value in self._report.results.items()}
            if self.saved_at != self.step:
                self.save()
        self._told_at = time.perf_counter()

    def on_train_end(self, _logs: Any = None) -> None:
        """Notice that another callback wants training to end."""
        self.ended = self.ended or bool(self.model.stop_training)

    def save(self) -> None:
        """Save a checkpoint."""
        self._check_scale()
        with self._report.saving():
            self._checkpoint.save(self.step)
        self._save_timer.saved()
        self.saved_at = self.step

    def evaluate(self) -> None:
        """Evaluate on the whole test split."""
        self._report.evaluate(self.step, self._evaluation)
        self.evaluated_at = self.step

    def _record_work(self) -> None:
        """Record that the workers of parameter servers have done the steps: Keras does not say which did what."""
        for worker in self._workers:
            worker.done(self.step)

    def _check_scale(self) -> None:
        scale = descent.loss_scale(self.model.optimizer)
        if scale is not None and scale.exhausted:
            raise descent.overflow(self.step)

    def _correct(self, logs: dict[str, float] | None) -> None:
        """Have the logs, which all callbacks share, say the means that they are meant to."""
        assert logs is not None
        for name in logs:
            logs[name] /= self._log_sums

    def _heed_signals(self) -> None:
        """Stop or save if any task wants it; all tasks call it at the same step."""
        signals = self._agree(steps.Signals(self._assignment.stop.is_set(), self._save_timer.due()))
        if signals.stop:
            self.stopped = self.ended = self.model.stop_training = True
        if signals.save:
            self.save()

    def _save_by_steps(self, before: int) -> None:
        """Save if that became due by the steps done since `before`."""
        config = self._assignment.config
        if not config.checkpoint_seconds and self.step // config.checkpoint_every > before // config.checkpoint_every:
            self.save()

    def _tell(self, logs: dict[str, float] | None) -> None:
        """Tell of the steps since the last time: Keras's logs are means since the epoch began."""
        assert logs is not None
        now, count = time.perf_counter(), self.step - self._told_step
        means_2 = np.array([logs["loss"], logs[self._assignment.objective.score_name]])
        self._check_scale()
        if not np.isfinite(means_2[0]):
            raise loops.not_finite(means_2[0], self.step)
        loss, score = (self._in_epoch * means_2 - self._sums_2) / max(1, min(count, self._in_epoch))
        self._sums_2 = self._in_epoch * means_2
        self._report.steps(
            self._told_step,
            np.full(count, loss, np.float32),
            np.full(count, score, np.float32),
            now - self._told_at,
            compiled=self._told_step == self._first,
            # Seen from outside a step cannot be told apart: Keras takes the batch from the iterator inside it.
            times=Times(np.array(self._batch_s)) if self._batch_s else None,
        )
        self._batch_s = []
        self._told_step, self._told_at = self.step, now


class _Loss(keras.losses.Loss):
    """The objective's loss for Keras, which takes its mean over the global batch."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(name="loss")
        self._assignment = assignment

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each example, `[B] float32`."""
        return self._assignment.objective.loss(_labels(self._assignment, y_true), steps.full_precision(y_pred))


def _labels(assignment: Assignment, labels: tf.Tensor) -> tf.Tensor:
    """Return labels as the data has them: Keras makes them as many-dimensional as the outputs, and of their type."""
    if not assignment.source.classifies:
        return labels
    return tf.cast(tf.reshape(labels, [-1]), tf.int64)


def _data(assignment: Assignment, first: int) -> Any:
    """Return the endless training data from step `first` on, in the form that `fit` takes under this strategy."""
    config, source = assignment.config, assignment.source
    weighted = source.arrays is not None and source.arrays.train.weights is not None

    def pair_or_triple(batch: Batch) -> tuple[tf.Tensor, ...]:
        features = tf.cast(batch.features, tf.float32)
        return (features, batch.labels, batch.weights) if weighted else (features, batch.labels)

    def of_task(context: tf.distribute.InputContext) -> tf.data.Dataset:
        if assignment.asynchronous:
            return parameter_server.shuffled_batches(source, config.global_batch, config.seed).map(pair_or_triple)
        return source.train_dataset(
            first_step=first,
            num_steps=None,
            global_batch=config.global_batch,
            seed=config.seed,
            **share_of(context),
        ).map(pair_or_triple)

    if is_legacy():
        return keras.utils.experimental.DatasetCreator(of_task)
    return of_task(tf.distribute.InputContext())  # global batches: Keras 3 shares them out itself
