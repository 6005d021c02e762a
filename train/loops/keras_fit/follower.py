"""What `--loop fit` does between two batches of Keras's: report, save, evaluate, stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tensorflow import keras

from cluster.recovery.step_record import StepRecord
from cluster.spec import Role
from train.context import TaskContext
from train.loops import callbacks, outer, steps
from train.model.gradients import GradientPolicy
from train.saving import timer as save_timer
from train.telemetry import trace
from train.telemetry.report import Report
from train.telemetry.timing import Times


class Follower(keras.callbacks.Callback):
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
        reset_metrics: Callable[[], None],
    ) -> None:
        """Follow a training that goes on from step `first`; `reset_metrics` restarts those of Keras's next epoch."""
        super().__init__()
        self._policy = policy
        self._reset_metrics = reset_metrics
        self._hooks = hooks
        self._context = context
        self._report = report
        self._checkpoint = checkpoint
        self._evaluation = context.new_evaluation()
        self._save_timer = context.new_save_timer(checkpoint, first)
        self._save_steps = save_timer.parse(context.config.checkpoint_every)[0]
        self._call_steps, self._call_ends = 1, first + 1
        self._agree: Callable[[steps.Signals], steps.Signals] = lambda signals: signals
        self.step = first
        self.ended = False
        """Whether training ends before its last step."""
        self.stopped = False
        """Whether that is because the task was requested to stop."""
        self.saved_at = self.evaluated_at = -1
        self._first = first
        self._results: list[np.ndarray] = []
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
        self._reset_metrics()

    def _on_batch_begin(self, *_batch: int, **_logs: Any) -> None:
        if self._hooks:
            self._hooks.begin_batch(self.step)
        self._tracer.before(self.step, compiles=self.step == self._first)
        self._batch_at = time.perf_counter()

    def _on_batch_end(self, _batch: int, logs: dict[str, float] | None = None) -> None:
        self._batch_s.append(time.perf_counter() - self._batch_at)
        config = self._context.config
        self._add(1, logs)
        self.step += 1
        self._report.done(self.step)
        self._tracer.after(self.step)
        if self._hooks:
            self._hooks.end_batch(self.step, 1, *self._results[-1].tolist())
        last = self.step == self._context.total_steps
        if self.step % config.log_every == 0 or last or self.step == self._first + 1:
            self._report_steps()
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
        if context.asynchronous:
            count = self.params["steps"]
            self._add(count, logs)
            before, self.step = self.step, self.step + count
            self._report.done(self.step)
            self._record_work()
            if self._hooks:
                self._hooks.add(count, *(count * self._results[-1]).tolist())
            self._report_steps()
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

    def _add(self, count: int, logs: dict[str, float] | None) -> None:
        """Note the mean loss and score of the newest steps: of one, except under parameter servers."""
        assert logs is not None
        self._results += [np.array([logs["loss"], logs[self._context.objective.score_name]], np.float64)] * count

    def _report_steps(self) -> None:
        """Report the steps since the last time."""
        now, count = time.perf_counter(), len(self._results)
        first, results_S2 = self.step - count, np.array(self._results, np.float32)
        self._policy.check_scale(self.step)
        bad = np.flatnonzero(~np.isfinite(results_S2[:, 0]))
        if bad.size:
            raise outer.not_finite(results_S2[bad[0], 0], first + int(bad[0]) + 1)
        count_s = float(np.sum(self._batch_s)) if self._batch_s else now - self._reported_at
        self._save_timer.stepped(count, count_s, compiled=first == self._first)
        self._report.steps(
            first,
            results_S2[:, 0],
            results_S2[:, 1],
            now - self._reported_at,
            compiled=first == self._first,
            # Seen from outside the parts of a step are unknown: Keras takes the batch from the iterator inside it.
            times=Times(np.array(self._batch_s)) if self._batch_s else None,
        )
        self._batch_s, self._results = [], []
        self._reported_at = now
