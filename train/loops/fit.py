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

from cluster.recovery.step_record import StepRecord
from cluster.spec import Role
from train.context import TaskContext
from train.data.memory import Batch
from train.data.sources import share_of
from train.loops import callbacks, outer, parameter_server, steps
from train.loops.callback_state import CallbackState
from train.loops.fit_step import MicroBatches, draw_by_place
from train.loops.train_step import full_precision
from train.model import keras_compat, legacy_compat
from train.model.export import is_legacy
from train.model.gradients import GradientPolicy
from train.saving import timer as save_timer
from train.telemetry import trace
from train.telemetry.report import Report
from train.telemetry.timing import Times


class Training:
    """One generation's training by `Model.fit`, from the newest checkpoint to the end or to a stop."""

    def __init__(self, context: TaskContext) -> None:
        self._context = context
        model, objective = context.model, context.objective
        with context.strategy.scope():
            if is_legacy():
                legacy_compat.install(model, context.config.seed)
            keras_compat.synchronize_batch_normalization(model, context.strategy.num_replicas_in_sync)
        state = CallbackState() if context.config.callbacks else None
        self._policy = context.new_policy()
        if context.config.micro_batches == 1:
            self._policy.install()
        optimizer = self._policy.optimizer
        self._checkpoint = context.new_checkpoint(self._policy, state)
        self._first = context.restore(self._checkpoint)
        self._report = Report(context, self._first, self._policy.loss_scale)
        with context.strategy.scope():
            score = keras.metrics.MeanMetricWrapper(
                lambda labels, outputs: objective.score(_labels(context, labels), full_precision(outputs)),
                objective.score_name,
            )
            micro_batches = MicroBatches(context, self._policy) if context.config.micro_batches > 1 else None
            if not micro_batches:
                draw_by_place(model, optimizer)
            # XLA over collectives on CPU crashes the process.
            # Unweighted, as in evaluation and in the custom loop.
            model.compile(optimizer, _Loss(context), metrics=[score], jit_compile=False)
            model.optimizer = optimizer  # not in Keras's own loss scaling: `train/model/gradients.py` says why
        self._reset_metrics = micro_batches.reset if micro_batches else lambda: None
        self._hooks = callbacks.Hooks(context, state) if state else None

    def run(self) -> None:
        """Train, and end well."""
        context, total = self._context, self._context.total_steps
        follower = _Follower(context, self._report, self._checkpoint, self._policy, self._first, self._hooks)
        follower.reset_metrics = self._reset_metrics
        follower.set_model(context.model)  # Keras does so in `fit`, which a training that is done needs not
        self._checkpoint.prepare()
        if self._hooks:
            self._hooks.begin(self._first, lambda _step: follower.evaluate())
            follower.ended = self._hooks.enough
        while follower.step < total and not follower.ended:
            count, times = self._next_epochs(follower.step)
            if follower.catches_up:  # until there is a checkpoint
                count, times = (1, 1) if context.asynchronous and not self._hooks else (count, times)
            context.model.fit(
                _data(context, follower.step),
                epochs=times,
                steps_per_epoch=count,
                callbacks=[follower],
                shuffle=False,  # the data is in its order already
                verbose=0,
            )
        self._end(follower)

    def _next_epochs(self, step: int) -> tuple[int, int]:
        """Return the steps of Keras's next epoch, and how many such epochs follow each other.

        Keras's epochs in one call are all of one length, and ours are not: each has a call of its own, and so has the
        rest of one after a resume in its middle. Under parameter servers Keras calls back at the end of an epoch alone,
        so without callbacks of the user's own, which count in epochs, an epoch is as short as an inner loop.
        """
        context, config = self._context, self._context.config
        left = context.total_steps - step
        if not context.asynchronous or self._hooks:
            return min(context.epoch_end(step) - step, left), 1
        count = min(config.steps_per_loop, left)
        return count, left // count

    def _end(self, follower: _Follower) -> None:
        stopped, hooks = follower.stopped, self._hooks
        if follower.saved_at != follower.step and (stopped or not hooks):
            follower.save()
        if not stopped and follower.evaluated_at != follower.step:
            follower.evaluate()
        if hooks:
            hooks.end(follower.step, self._report.results, stopped=stopped)
            if not stopped:
                follower.save()  # with what callbacks did at the end, such as to take the best weights
        self._checkpoint.wait()
        self._report.end(follower.step, stopped=stopped)


class _Follower(keras.callbacks.Callback):
    """Does between two batches what the custom loop does between two inner calls.

    It is Keras's only callback, and calls those of the user's own: a training is several calls of `fit`, of which they
    shall know nothing.
    """

    def __init__(
        self,
        context: TaskContext,
        report: Report,
        checkpoint: Any,
        policy: GradientPolicy,
        first: int,
        hooks: callbacks.Hooks | None,
    ) -> None:
        super().__init__()
        self._policy = policy
        self.reset_metrics: Callable[[], None] = lambda: None
        """Has metrics begin anew that Keras does not know."""
        self._hooks = hooks
        self._context = context
        self._report = report
        self._checkpoint = checkpoint
        self._evaluation = context.new_evaluation()
        self._save_timer = context.new_save_timer(checkpoint, first)
        self._save_steps = save_timer.parse(context.config.checkpoint_every)[0]
        self._call_steps, self._call_ends = 1, first + 1
        self._agree: Callable[[steps.Signals], steps.Signals] = lambda signals: signals
        # On several tasks tf_keras adds up over all replicas what it logs (its `reduce_per_replica`), means too.
        summed = is_legacy() and isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self._log_sums = context.strategy.num_replicas_in_sync if summed else 1
        self.step = first
        self.ended = False
        """Whether training ends before its last step."""
        self.stopped = False
        """Whether that is because the task was requested to stop."""
        self.saved_at = self.evaluated_at = -1
        self._first = first
        self._reported_step = first
        self._in_epoch = 0
        self._sums_2, self._batch_sums_2 = np.zeros(2), np.zeros(2)
        self._reported_at = self._batch_at = time.perf_counter()
        self._batch_s: list[float] = []
        self._tracer = trace.Tracer(context.run, context.task.name)
        generation = context.heartbeat.values["generation"]
        workers = context.spec.of(Role.WORKER) if context.asynchronous else ()
        self._workers = [StepRecord(context.run, worker.name, generation) for worker in workers]
        if not context.asynchronous:
            self._agree = steps.agreement(context.strategy)
            # Under parameter servers Keras refuses callbacks that have this method at all.
            self.on_train_batch_begin = self._on_batch_begin
            self.on_train_batch_end = self._on_batch_end

    def on_epoch_begin(self, _epoch: int, _logs: Any = None) -> None:
        """Keras's running means begin anew."""
        self.reset_metrics()
        self._in_epoch = 0
        self._sums_2, self._batch_sums_2 = np.zeros(2), np.zeros(2)

    def _on_batch_begin(self, *_batch: int, **_logs: Any) -> None:
        if self._hooks:
            self._hooks.begin_batch(self.step)
        self._tracer.before(self.step, compiles=self.step == self._first)
        self._batch_at = time.perf_counter()

    def _on_batch_end(self, _batch: int, logs: dict[str, float] | None = None) -> None:
        self._batch_s.append(time.perf_counter() - self._batch_at)
        config = self._context.config
        self._correct(logs)
        self.step += 1
        self._in_epoch += 1
        self._report.done(self.step)
        self._tracer.after(self.step)
        if self._hooks:
            sums_2 = self._in_epoch * self._means(logs)
            self._hooks.end_batch(self.step, 1, *(sums_2 - self._batch_sums_2).tolist())
            self._batch_sums_2 = sums_2
        last = self.step == self._context.total_steps
        if self.step % config.log_every == 0 or last or self.step == self._first + 1:
            self._report_steps(logs)
        if not last:
            # Where the custom loop returns from an inner call.
            if self.step == self._call_ends:
                self._follow_signals()
            self._save_by_steps(self.step - 1)
        if not last and config.evaluate_every and self.step % config.evaluate_every == 0:
            self.evaluate()

    def on_epoch_end(self, _epoch: int, logs: dict[str, float] | None = None) -> None:
        """Evaluate, call the user's callbacks, and save."""
        context, before = self._context, self.step - 1
        self._correct(logs)
        if context.asynchronous:
            count = self._in_epoch = self.params["steps"]
            before, self.step = self.step, self.step + count
            self._report.done(self.step)
            self._record_work()
            if self._hooks:
                self._hooks.add(count, *(count * self._means(logs)).tolist())
            self._report_steps(logs)
            self._follow_signals()
            self._save_by_steps(before)
        if not self.ended and context.epoch_end(before) <= self.step < context.total_steps:
            self._end_epoch()
        self._reported_at = time.perf_counter()

    def _end_epoch(self) -> None:
        if not self._context.config.evaluate_every:
            self.evaluate()
        if self._hooks:
            self._hooks.end_epoch(self.step, self._report.results)
            if self._any_enough():
                self._hooks.enough = self.ended = self.model.stop_training = True
            else:
                self._hooks.begin_epoch(self.step)
        if self.saved_at != self.step:
            self.save()

    def _any_enough(self) -> bool:
        """Return whether any task's callbacks want training to end; all tasks call it at the same step."""
        return self._agree(steps.Signals(stop=self._hooks is not None and self._hooks.enough)).stop

    def save(self) -> None:
        """Save a checkpoint."""
        self._policy.check_scale(self.step)
        if self._hooks:
            self._hooks.keep()
        self._report.save(self.step, self._checkpoint, self._save_timer)
        self.saved_at = self.step

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the whole test split; return the results."""
        self._report.evaluate(self.step, self._evaluation)
        self.evaluated_at = self.step
        return self._report.results

    @property
    def catches_up(self) -> bool:
        """Whether a checkpoint is to be saved as soon as there are new steps."""
        return self._save_timer.due(0) and self.step == self._first

    def _record_work(self) -> None:
        """Record that the workers of parameter servers have done the steps: Keras does not say which did what."""
        for worker in self._workers:
            worker.done(self.step)

    def _correct(self, logs: dict[str, float] | None) -> None:
        """Have the logs, which all callbacks share, say the means that they are meant to."""
        assert logs is not None
        for name in logs:
            logs[name] /= self._log_sums

    def _follow_signals(self) -> None:
        """Stop or save if any task requests it; all tasks call it at the same step."""
        enough, timer = self._hooks is not None and self._hooks.enough, self._save_timer
        brief = timer.brief(self._call_steps)
        signals = self._agree(steps.Signals(self._context.stop.is_set() or enough, timer.due(0), brief))
        self._call_steps = save_timer.following_steps(
            self._call_steps, self._context.config.steps_per_loop, brief=signals.brief
        )
        self._call_ends = self.step + self._call_steps
        if signals.stop:
            self.stopped = not self._any_enough()
            self.ended = self.model.stop_training = True
        if signals.save:
            self.save()

    def _save_by_steps(self, before: int) -> None:
        """Save if that became due by the steps done since `before`."""
        if (every := self._save_steps) and self.step // every > before // every:
            self.save()

    def _means(self, logs: dict[str, float] | None) -> np.ndarray:
        """Return the means of the loss and the score since Keras's epoch began."""
        assert logs is not None
        return np.array([logs["loss"], logs[self._context.objective.score_name]], np.float64)

    def _report_steps(self, logs: dict[str, float] | None) -> None:
        """Report the steps since the last time: Keras's logs are means since the epoch began."""
        now, count = time.perf_counter(), self.step - self._reported_step
        means_2 = self._means(logs)
        self._policy.check_scale(self.step)
        if not np.isfinite(means_2[0]):
            raise outer.not_finite(means_2[0], self.step)
        count_s = float(np.sum(self._batch_s)) if self._batch_s else now - self._reported_at
        self._save_timer.stepped(count, count_s, compiled=self._reported_step == self._first)
        loss, score = (self._in_epoch * means_2 - self._sums_2) / max(1, min(count, self._in_epoch))
        self._sums_2 = self._in_epoch * means_2
        self._report.steps(
            self._reported_step,
            np.full(count, loss, np.float32),
            np.full(count, score, np.float32),
            now - self._reported_at,
            compiled=self._reported_step == self._first,
            # Seen from outside the parts of a step are unknown: Keras takes the batch from the iterator inside it.
            times=Times(np.array(self._batch_s)) if self._batch_s else None,
        )
        self._batch_s = []
        self._reported_step, self._reported_at = self.step, now


class _Loss(keras.losses.Loss):
    """The objective's loss for Keras, which takes its mean over the global batch."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(name="loss")
        self._context = context

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each example, `[B] float32`."""
        return self._context.objective.loss(_labels(self._context, y_true), full_precision(y_pred))


def _labels(context: TaskContext, labels: tf.Tensor) -> tf.Tensor:
    """Return labels as the data has them: Keras makes them as many-dimensional as the outputs, and of their type."""
    if not context.source.classifies:
        return labels
    return tf.cast(tf.reshape(labels, [-1]), tf.int64)


def _data(context: TaskContext, first: int) -> Any:
    """Return the endless training data from step `first` on, in the form that `fit` takes under this strategy."""
    config, source = context.config, context.source
    weighted = source.arrays is not None and source.arrays.train.weights is not None

    def pair_or_triple(batch: Batch) -> tuple[tf.Tensor, ...]:
        features = tf.cast(batch.features, tf.float32)
        return (features, batch.labels, batch.weights) if weighted else (features, batch.labels)

    def of_task(pipeline: tf.distribute.InputContext) -> tf.data.Dataset:
        if context.asynchronous:
            return parameter_server.shuffled_batches(source, config.global_batch, config.seed).map(pair_or_triple)
        return source.train_dataset(
            first_step=first,
            num_steps=None,
            global_batch=config.global_batch,
            seed=config.seed,
            **share_of(pipeline),
        ).map(pair_or_triple)

    if is_legacy():
        return keras.utils.experimental.DatasetCreator(of_task)
    return of_task(tf.distribute.InputContext())  # global batches: Keras 3 shares them out itself
