"""The work of `--loop fit` between two of Keras's batches: report, save, evaluate, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tensorflow import keras

from cluster.contract.recovery.step_record import StepRecord
from cluster.contract.spec import Role
from cluster.system.errors import UsageError
from train.context import TaskContext
from train.loops import callbacks, outer, steps
from train.model.gradients import GradientPolicy
from train.saving import timer as save_timer
from train.telemetry import trace
from train.telemetry.report import Report
from train.telemetry.timing import Times


class Follower(keras.callbacks.Callback):
    """Does the work between two batches that the custom loop does between two inner calls.

    It is Keras's only callback and calls the user's callbacks, which must not notice that a training is several calls
    of `fit`.
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
        """Whether training ended because the task was requested to stop."""
        self.saved_at = -1
        self._first = first
        self._results: list[dict[str, float]] = []
        self._reported_at = self._batch_at = time.perf_counter()
        self._batch_s: list[float] = []
        self._tracer = trace.Tracer(context.run, context.task.name)
        generation = context.generation
        workers = context.spec.of(Role.WORKER) if context.asynchronous else ()
        self._workers = [StepRecord(context.run, worker.name, generation) for worker in workers]
        if not context.asynchronous:
            self._agree = steps.agreement(context.strategy)
            # Under parameter servers Keras refuses callbacks that have these methods.
            self.on_train_batch_begin = self._on_batch_begin
            self.on_train_batch_end = self._on_batch_end

    def on_epoch_begin(self, _epoch: int, _logs: Any = None) -> None:
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
            self._hooks.end_batch(self.step, 1, self._results[-1])
        last = self.step == self._context.total_steps
        if self.step % config.log_every == 0 or last or self.step == self._first + 1:
            self._report_steps()
        if not last:
            if config.evaluate_every and self.step % config.evaluate_every == 0:
                self.evaluate()  # before it is saved
            # Where the custom loop returns from an inner call.
            if self.step == self._call_ends:
                self._follow_signals()
            self._save_by_steps(self.step - 1)

    def on_epoch_end(self, _epoch: int, logs: dict[str, float] | None = None) -> None:
        """Evaluate, call the user's callbacks and save."""
        context, before = self._context, self.step - 1
        if context.asynchronous:
            count = self.params["steps"]
            self._add(count, logs)
            before, self.step = self.step, self.step + count
            self._report.done(self.step)
            self._record_work()
            if self._hooks:
                self._hooks.add(count, {name: count * value for name, value in self._results[-1].items()})
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
            if self._any_should_stop():
                self._hooks.enough = self.ended = self.model.stop_training = True
            else:
                self._hooks.begin_epoch(self.step)
        if self.saved_at != self.step:
            self.save()

    def _any_should_stop(self) -> bool:
        """Whether any task's callbacks request the end of training; all tasks call it at the same step."""
        return self.agree_on(self._hooks is not None and self._hooks.enough)

    def agree_on(self, condition: bool) -> bool:
        """Whether the condition holds on any task; all tasks call it at the same step."""
        return self._agree(steps.Signals(stop=condition)).stop

    def newest(self) -> dict[str, float]:
        """Return the newest results: with `--evaluate-every` those of the checkpoint, otherwise of a new evaluation."""
        return self._report.results if self._context.config.evaluate_every else self.evaluate()

    def save(self) -> None:
        self._policy.check_scale(self.step)
        if self._hooks:
            self._hooks.keep(self._report.results, self._report.evaluated_at)
        self._report.save(self.step, self._checkpoint, self._save_timer)
        self.saved_at = self.step

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the whole test split; return the results."""
        with self._hooks.evaluating(lambda: self._report.results) if self._hooks else contextlib.nullcontext():
            self._report.evaluate(self.step, self._evaluation)
        return self._report.results

    @property
    def catches_up(self) -> bool:
        """Whether a checkpoint is due as soon as there are new steps."""
        return self._save_timer.due(0) and self.step == self._first

    def _record_work(self) -> None:
        """Record the steps for every worker of parameter servers: Keras does not report which worker did which."""
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
            self.stopped = not self._any_should_stop()
            self.ended = self.model.stop_training = True
        if signals.save:
            self.save()

    def _save_by_steps(self, before: int) -> None:
        """Save if a checkpoint became due since step `before`."""
        if (every := self._save_steps) and self.step // every > before // every:
            self.save()

    def _add(self, count: int, logs: Mapping[str, Any] | None) -> None:
        """Add the values of the newest steps: of one step, except under parameter servers."""
        values = {name: float(value) for name, value in (logs or {}).items()}
        if "loss" not in values:
            raise UsageError(
                f"--model {self._context.config.model}: its train_step returned {', '.join(values) or 'nothing'}; "
                "expected 'loss' among them"
            )
        self._results += [values] * count

    def _report_steps(self) -> None:
        now, count = time.perf_counter(), len(self._results)
        first = self.step - count
        names = {name: None for values in self._results for name in values}
        values = {name: np.array([step.get(name, np.nan) for step in self._results], np.float32) for name in names}
        self._policy.check_scale(self.step)
        bad = np.flatnonzero(~np.isfinite(values["loss"]))
        if bad.size:
            raise outer.not_finite(values["loss"][bad[0]], first + int(bad[0]) + 1)
        count_s = float(np.sum(self._batch_s)) if self._batch_s else now - self._reported_at
        self._save_timer.stepped(count, count_s, compiled=first == self._first)
        self._report.steps(
            first,
            values,
            now - self._reported_at,
            compiled=first == self._first,
            # The parts of a step are unknown: Keras gets the batch from the iterator inside it.
            times=Times(np.array(self._batch_s)) if self._batch_s else None,
        )
        self._batch_s, self._results = [], []
        self._reported_at = now
