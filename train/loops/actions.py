"""Actions of the training loop, except callbacks and reports: checks, traces, evaluations, checkpoints."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S
from cluster.contract.run.records import TraceRequest
from cluster.system.json_files import write_json
from train.callbacks.callback_actions import Callbacks
from train.context import TaskContext
from train.loops.loop import Action, CallProgress, Periodic, Stop, every
from train.model.gradients import GradientPolicy
from train.saving.checkpoint import CheckpointManager, divergence_error
from train.saving.timer import Past, SaveTimer, parse_interval
from train.telemetry.report import Report


class CheckFinite(Action):
    """Ends the training with an error that names the step if the loss is NaN or infinite.

    A flipped bit can be the cause. The replicas then still differ, and the run continues from an earlier state.
    """

    def __init__(self, policy: GradientPolicy, compare: Callable[[int], object]) -> None:
        """`compare` raises an error if replicas differ after a step. All tasks have the same losses, and so call it."""
        self._policy, self._compare = policy, compare

    def after(self, progress: CallProgress) -> None:
        losses = progress.result.losses
        bad = np.flatnonzero(~np.isfinite(losses))
        step = progress.first + int(bad[0]) + 1 if bad.size else progress.step
        self._policy.check_scale(step)
        if bad.size:
            self._compare(progress.step)
            raise divergence_error(f"loss is {losses[bad[0]]} at step {step}")


class EndTraining(Action):
    """Ends the training at its last step, or when any task requests it."""

    def __init__(self, total: int, any_stops: Callable[[], bool]) -> None:
        """End after `total` steps; `any_stops` returns whether callbacks of any task end the training."""
        self._total, self._any_stops = total, any_stops

    def next(self, _step: int) -> int:
        return self._total

    def after(self, progress: CallProgress) -> Stop | None:
        if progress.step >= self._total:
            return Stop.END
        if progress.result.signals.stop:
            return Stop.END if self._any_stops() else Stop.REQUESTED
        return None


class Trace(Action):
    """Traces some steps of this task with TensorFlow's profiler, as `invoke profile` requests, without other tasks."""

    def __init__(self, run: RunFolder, task: str) -> None:
        self._run, self._task = run, task
        self._compiled = False
        self._request: TraceRequest | None = None
        self._first = 0
        self._call: Any = None

    def before(self, step: int) -> None:
        """Begin a trace if one is requested, unless the call compiles."""
        if self._request is None and self._compiled and self._run.trace_request.exists():
            request = records.read_record(self._run.trace_request, TraceRequest.from_json, None)
            if request is not None and request.task == self._task:
                try:
                    tf.profiler.experimental.start(str(self._run.tensorboard(self._task)))
                except tf.errors.OpError as error:  # a user's callback is already tracing
                    self._answer(request, error=error.message)
                else:
                    self._request, self._first = request, step
        if self._request is not None:
            self._call = tf.profiler.experimental.Trace("train", step_num=step, _r=1)
            self._call.__enter__()

    def after(self, progress: CallProgress) -> None:
        self.end(progress.step)

    def end(self, step: int) -> None:
        """End the trace after a call, at `step`, if it contains the requested steps."""
        self._compiled = True
        if self._request is None:
            return
        self._call.__exit__(None, None, None)
        if step - self._first >= self._request.steps:
            request, self._request = self._request, None
            try:
                tf.profiler.experimental.stop()
            except tf.errors.OpError as error:
                self._answer(request, error=error.message)
            else:
                self._answer(request, first=self._first + 1, last=step)

    def _answer(self, request: TraceRequest, **answer: Any) -> None:
        write_json(self._run.trace_answer, {"id": request.id, "task": self._task, **answer})
        current = records.read_record(self._run.trace_request, TraceRequest.from_json, None)
        if current and current.id == request.id:
            self._run.trace_request.unlink(missing_ok=True)


class Evaluate(Periodic):
    """Evaluates on the test split every `evaluate_every` steps, or at the end of each epoch."""

    def __init__(
        self,
        context: TaskContext,
        report: Report,
        new_evaluation: Callable[[], Callable[[], dict[str, float]]],
        callbacks: Callbacks | None,
    ) -> None:
        """`new_evaluation` is a factory of the evaluation function, which all tasks call."""
        steps = context.config.evaluate_every
        super().__init__(every(steps) if steps else context.epoch_end)
        self._report = report
        self.measure = functools.cache(new_evaluation)  # called late: the first step does not wait for the test split
        self._callbacks, self._total = callbacks, context.total_steps

    def after(self, progress: CallProgress) -> None:
        if self.due(progress):
            self.evaluate(progress.step)

    def evaluate(self, step: int) -> None:
        # Callbacks may take as long as the evaluation itself.
        with self._report.evaluating(), self._callbacks.evaluating() if self._callbacks else contextlib.nullcontext():
            self._report.evaluate(step, self.measure())

    def catch_up(self, first: int) -> None:
        """On resuming, run the evaluation that was due when the training stopped."""
        if 0 < first < self._total and self.next(first - 1) == first != self._report.evaluated_at:
            self.evaluate(first)


class Save(Periodic):
    """Saves a checkpoint at fixed steps, or when its timer requests one."""

    def __init__(
        self,
        context: TaskContext,
        report: Report,
        checkpoint: CheckpointManager,
        first: int,
        prepare: Callable[[int], object],
    ) -> None:
        """Save a training from step `first` on; call `prepare` before each save. Only the chief's timer decides."""
        interval = context.config.checkpoint_every
        super().__init__(every(parse_interval(interval)[0]))
        past = Past.read(context.run, context.generation, first) if context.chief else None
        # The watchdog sees progress, and tasks see a stop request, only between calls.
        call_s = min(context.run.started.hang_timeout_s or HANG_TIMEOUT_S, HANG_TIMEOUT_S) / 6
        self.timer = SaveTimer(interval, past, call_s=call_s, writing=lambda: checkpoint.writing)
        self._report, self._checkpoint, self._prepare = report, checkpoint, prepare
        self.saved_at: int | None = None

    def after(self, progress: CallProgress) -> None:
        self.timer.stepped(len(progress.result.losses), progress.seconds, compiled=progress.compiled)
        if progress.result.signals.save or self.due(progress):
            self.save(progress.step)

    def save(self, step: int) -> None:
        self._prepare(step)
        self._report.save(step, self._checkpoint, self.timer)
        self.saved_at = step


class KeepSnapshot(Action):
    """Keeps snapshots of the state in memory after calls, in at most `SHARE` of the time."""

    SHARE = 0.02
    AHEAD_S = 10.0
    """Head start of the clock in seconds, so that snapshots can follow the first, short calls as well."""

    def __init__(self, keep: Callable[[int], float]) -> None:
        """`keep` returns the seconds that it waited for slower tasks: no cost, as the next step would wait."""
        self._keep = keep
        self._began = time.monotonic() - self.AHEAD_S
        self._step_s = self._cost_s = self._spent_s = 0.0

    def due(self, steps: int) -> bool:
        """Whether a snapshot is due after `steps` further steps, by this task's clock."""
        passed_s = time.monotonic() - self._began + steps * self._step_s
        return self._spent_s + self._cost_s <= self.SHARE * passed_s

    def after(self, progress: CallProgress) -> None:
        if not progress.compiled:
            self._step_s = progress.seconds / len(progress.result.losses)
        if progress.result.signals.snapshot:
            began = time.monotonic()
            waited_s = self._keep(progress.step)
            self._cost_s = time.monotonic() - began - waited_s
            self._spent_s += self._cost_s
