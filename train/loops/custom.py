"""`--loop custom`: our own loop, many steps in one `tf.function`, with Keras callbacks where a run names them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from tensorflow import keras

from cluster.contract.recovery import step_record
from cluster.contract.spec import Role
from cluster.system.errors import PrerequisiteError
from train.context import TaskContext
from train.data.sources import train_feed
from train.elastic.train_step import ElasticTrainStep
from train.elastic.virtual_shards import VirtualShards
from train.loops import callbacks, outer, parameter_server, pipeline, steps
from train.loops.best import Best, BestState, check_metric
from train.loops.callback_state import CallbackState
from train.loops.train_step import TrainStep
from train.patches import batch_normalization
from train.pipeline import timeline
from train.saving import timer
from train.telemetry import trace
from train.telemetry.report import Report


class Training:
    """One generation's training by the custom loop, from the newest checkpoint to the end or to a stop."""

    def __init__(self, context: TaskContext) -> None:
        self._context = context
        config, strategy = context.config, context.strategy
        with strategy.scope():
            if not config.bitwise_elastic:  # virtual shards must not depend on each other
                batch_normalization.synchronize_batch_normalization(context.model, strategy.num_replicas_in_sync)
        self._policy = context.new_policy()
        self._state = CallbackState() if config.callbacks else None
        self._best_state = BestState() if config.best.metric else None
        self._checkpoint = context.new_checkpoint(self._policy, self._state, self._best_state)
        self._gather = context.gathering()
        self._first = 0
        self._rehearsed: outer.Inner | None = None
        self._pipeline: pipeline.Pipeline | None = None
        self._save_timer: timer.SaveTimer | None = None
        self._saved_at: int | None = None

    def rehearse(self) -> None:
        """Trace and compile the step in a standby process, without changing any weight."""
        self._gather(0)
        self._rehearsed = self._synchronous()
        self._rehearsed(0, 0, False)

    def _begin(self) -> None:
        """Restore the newest checkpoint and build the loop that continues from it."""
        context, strategy = self._context, self._context.strategy
        self._first = context.restore(self._checkpoint, self._gather)
        self._best: Best | None = None
        if self._best_state is not None:
            check_metric(context)
            self._best = Best(context.config.best, context.total_steps, self._best_state)
        self._report = Report(context, self._first, self._policy, self._outputs)
        self._save_timer = context.new_save_timer(self._checkpoint, self._first)
        names = [task.name for task in context.spec.of(Role.WORKER)] if context.asynchronous else []
        self._worked = [step_record.StepRecord(context.run, name, context.generation) for name in names]
        if context.spec.kind.staged:
            self._pipeline = pipeline.Pipeline(context, self._policy, self._signals)
            self._inner: outer.Inner = self._pipeline.run
        elif context.asynchronous:
            self._inner = self._asynchronous()
        else:
            self._inner = self._rehearsed or self._synchronous()
        # Under parameter servers the chief decides alone.
        self._agree = (lambda signals: signals) if context.asynchronous else steps.agreement(context.gang)
        self._hooks: callbacks.Hooks | None = None
        if self._state is not None:
            with strategy.scope():  # callbacks ask the model for its optimizer
                # The base class's method: a model's override may take other arguments.
                keras.Model.compile(context.model, optimizer=self._policy.optimizer, jit_compile=False)
            self._hooks = callbacks.Hooks(context, self._state)
            self._report.results, self._report.evaluated_at = self._hooks.results, self._hooks.evaluated_at

    def _synchronous(self) -> outer.Inner:
        """Return the inner loop in which all replicas take part in every step."""
        context, config = self._context, self._context.config
        replicas = context.strategy.num_replicas_in_sync
        parts = context.model, self._policy, context.objective, config.global_batch
        alone = replicas == 1 and config.micro_batches > 1
        cut, train_step = None, TrainStep(*parts, replicas, config.micro_batches, as_function=alone)
        if shards := config.bitwise_elastic:
            cut = VirtualShards(shards, replicas)
            train_step = ElasticTrainStep(*parts, shards, config.micro_batches, shards=cut)
        data = context.source, self._first, config.global_batch, config.seed
        feed = train_feed(context.strategy, *data, cut, config.micro_batches)
        return steps.SynchronousSteps(context.strategy, train_step, feed, config.steps_per_loop, self._signals)

    def _asynchronous(self) -> outer.Inner:
        """Return the inner loop in which each worker does separate steps."""
        context, config = self._context, self._context.config
        train_step = TrainStep(
            context.model, self._policy, context.objective, config.global_batch, 1, config.micro_batches
        )
        return parameter_server.AsynchronousSteps(
            context.strategy,
            train_step,
            context.source,
            seed=config.seed,
            steps_per_loop=config.steps_per_loop,
            workers=len(self._worked),
            signals=self._signals,
            worked=self._record_work,
        )

    def run(self) -> None:
        """Train to the end or to a stop, then save, evaluate and report."""
        self._begin()
        config, context = self._context.config, self._context
        epoch = outer.EveryEpoch(context.epoch_end, self._follow_evaluation)
        every: list[outer.Periodic] = [
            outer.Every(config.evaluate_every, self._follow_evaluation) if config.evaluate_every else epoch
        ]
        if self._hooks:
            self._hooks.begin(self._first, lambda: self._overdue(every[0]))
            every.append(outer.EveryEpoch(context.epoch_end, self._end_epoch))
        if self._hooks or self._best:
            self._overdue(every[0])
        if by_steps := timer.parse(config.checkpoint_every)[0]:
            every.append(outer.Every(by_steps, self._save))  # including changes by callbacks
        inner = trace.Tracer(context.run, context.task.name).around(self._policy.around(self._inner))
        step, stopped = outer.run(
            inner if self._hooks is None else self._hooks.around(inner),
            self._first,
            self._first if self._should_stop else context.total_steps,
            steps_per_loop=config.steps_per_loop,
            every=every,
            report=self._report_steps,
            stop=lambda: context.stop.is_set() or self._should_stop,
            save=self._save,
            single=step_record.single_steps(context.run, context.generation, config.steps_per_loop, self._gather),
        )
        stopped = stopped and not self._any_should_stop()
        if self._best and not stopped and self._report.evaluated_at != step:
            self._evaluate(step)  # so that the last checkpoint includes it
        if self._saved_at != step and (stopped or not self._hooks):
            self._save(step)
        if not stopped and self._report.evaluated_at != step:
            self._evaluate(step)
        if self._hooks:
            changed = self._hooks.end(step, self._report.results, stopped=stopped)
            if not stopped:
                if self._agree(steps.Signals(stop=changed)).stop:
                    self._evaluate(step)
                self._save(step)  # callbacks may have changed weights at the end, such as to the best ones
        self._checkpoint.release()
        if context.division and not context.division.whole:
            context.division.release()  # the chief needs memory for the whole model
        self._report.end(step, stopped=stopped)

    @functools.cached_property
    def _evaluation(self) -> Callable[[], dict[str, float]]:
        if self._pipeline:
            return self._pipeline.evaluation()
        return self._context.new_evaluation()  # reads the test split, for which the first step need not wait

    def _outputs(self, features: np.ndarray) -> Any:
        if self._pipeline:
            return self._pipeline.outputs(features)
        return self._context.model(features, training=False)

    @property
    def _should_stop(self) -> bool:
        return any(part is not None and part.enough for part in (self._hooks, self._best))

    def _any_should_stop(self) -> bool:
        """Whether any task's callbacks or evaluations request the end; all tasks call it at the same step."""
        return self._agree(steps.Signals(stop=self._should_stop)).stop

    def _signals(self, stop: bool, count: int) -> steps.Signals:
        if self._save_timer is None:  # of a rehearsal
            return steps.Signals(stop)
        return steps.Signals(stop, self._save_timer.due(count), self._save_timer.brief(count))

    def _record_work(self, worker: int, step: int) -> None:
        """Record that a worker of parameter servers has done its part of the steps up to this one."""
        self._worked[worker].done(step)

    def _report_steps(self, progress: outer.Progress) -> None:
        assert self._save_timer is not None
        result = progress.result
        self._save_timer.stepped(len(result.losses), progress.seconds, compiled=progress.compiled)
        self._report.steps(
            progress.first,
            {"loss": result.losses, self._context.objective.score_name: result.scores},
            progress.seconds,
            compiled=progress.compiled,
            times=result.times,
        )

    def _save(self, step: int) -> None:
        assert self._save_timer is not None
        if self._hooks:
            self._hooks.keep(self._report.results, self._report.evaluated_at)
        if self._best:
            self._best.keep()
        self._report.save(step, self._checkpoint, self._save_timer)
        self._saved_at = step

    def _evaluate(self, step: int) -> dict[str, float]:
        with self._hooks.evaluating(lambda: self._report.results) if self._hooks else contextlib.nullcontext():
            self._report.evaluate(step, self._evaluation)
        if self._pipeline and self._context.chief:
            with contextlib.suppress(PrerequisiteError):  # no step is recorded yet
                self._report.metrics.picture(step, "stages/timeline", timeline.picture_of(self._context.run)[1])
        if self._best and self._best.follow(step, self._report.results):
            self._best.keep()
            self._report.save_best(step, self._checkpoint)
        return self._report.results

    def _overdue(self, evaluation: outer.Periodic) -> dict[str, float]:
        """Return the newest results; first evaluate if a stop has prevented an evaluation."""
        first, done = self._first, {self._report.evaluated_at, self._best.evaluated_at if self._best else -1}
        if 0 < first < self._context.total_steps and evaluation.due(first) and first not in done:
            self._evaluate(first)
        return self._report.results

    def _follow_evaluation(self, step: int) -> bool:
        """Evaluate; return whether training must end, which all tasks decide together."""
        self._evaluate(step)
        return self._best is not None and self._any_should_stop()

    def _end_epoch(self, step: int) -> bool:
        """Call the callbacks; return whether training must end, which all tasks decide together."""
        assert self._hooks is not None
        self._hooks.end_epoch(step, self._report.results)
        if self._any_should_stop():
            self._hooks.enough = True
            return True
        self._hooks.begin_epoch(step)
        return False
