"""`--loop custom`: our own loop, many steps in one `tf.function`, with Keras callbacks where a run wants them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cluster import step_record
from cluster.spec import Role
from train import callbacks, descent, guards, loops, parameter_server, steps, trace
from train.assignment import Assignment
from train.elastic import ElasticTrainee
from train.report import Report
from train.sources import train_feed
from train.virtual_shards import VirtualShards


class Training:
    """One life's training by the custom loop, from the newest checkpoint to the end or to a stop."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        config, strategy = assignment.config, assignment.strategy
        with strategy.scope():
            if not config.bitwise_elastic:  # a virtual shard knows nothing of those that are computed elsewhere
                guards.synchronize_batch_normalization(assignment.model, strategy.num_replicas_in_sync)
        self._optimizer = assignment.new_optimizer()
        self._checkpoint = assignment.new_checkpoint(self._optimizer)
        self._first = self._checkpoint.restore()
        if not assignment.asynchronous:
            steps.check_same_step(strategy, self._first)
        self._report = Report(assignment, self._first, descent.loss_scale(self._optimizer))
        self._save_timer = loops.SaveTimer(config.checkpoint_seconds if assignment.chief else 0)
        self._generation = assignment.heartbeat.values["generation"]
        names = [task.name for task in assignment.spec.of(Role.WORKER)] if assignment.asynchronous else []
        self._worked = [step_record.StepRecord(assignment.run, name, self._generation) for name in names]
        shards = config.bitwise_elastic
        cut = VirtualShards(shards, strategy.num_replicas_in_sync) if shards else None
        trainee = self._trainee(cut)
        if assignment.asynchronous:
            self._inner = parameter_server.asynchronous(
                strategy,
                trainee,
                assignment.source,
                seed=config.seed,
                steps_per_loop=config.steps_per_loop,
                workers=len(assignment.spec.of(Role.WORKER)),
                save_due=self._save_timer.due,
                worked=self._record_work,
            )
            self._agree: Callable[[steps.Signals], steps.Signals] = lambda signals: signals  # the chief decides alone
        else:
            feed = train_feed(strategy, assignment.source, self._first, config.global_batch, config.seed, cut)
            self._inner = steps.synchronous(strategy, trainee, feed, config.steps_per_loop, self._save_timer.due)
            self._agree = steps.agreement(strategy)
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None
        self._hooks = callbacks.Hooks(assignment, self._optimizer) if config.callbacks else None

    def _trainee(self, cut: VirtualShards | None) -> steps.Trainee:
        assignment = self._assignment
        what = assignment.model, self._optimizer, assignment.objective, assignment.config.global_batch
        if cut:
            return ElasticTrainee(*what, cut.total, cut)
        return steps.Trainee(*what, 1 if assignment.asynchronous else assignment.strategy.num_replicas_in_sync)

    def run(self) -> None:
        """Train, and end well."""
        config, assignment = self._assignment.config, self._assignment
        every = [loops.Every(config.evaluate_every or assignment.epoch_steps, self._evaluate)]
        if self._hooks:
            self._hooks.begin(self._first)
            every.append(loops.Every(assignment.epoch_steps, self._end_epoch))
        if not config.checkpoint_seconds:
            every.append(loops.Every(config.checkpoint_every, self._save))  # with what callbacks have changed
        inner = trace.Tracer(assignment.run, assignment.task.name).around(descent.watched(self._inner, self._optimizer))
        step, stopped = loops.run(
            inner if self._hooks is None else self._hooks.around(inner),
            self._first,
            assignment.total_steps,
            steps_per_loop=config.steps_per_loop,
            every=every,
            report=self._tell,
            stop=lambda: assignment.stop.is_set() or self._enough,
            save=self._save,
            single=step_record.single_steps(assignment.run, self._generation, config.steps_per_loop),
        )
        stopped = stopped and not self._any_enough()
        if self._saved_at != step:
            self._save(step)
        if not stopped and self._evaluated_at != step:
            self._evaluate(step)
        self._checkpoint.wait()
        if self._hooks:
            self._hooks.end(step, self._report.results, stopped=stopped)
        self._report.end(step, stopped=stopped)

    @functools.cached_property
    def _evaluation(self) -> Callable[[], dict[str, float]]:
        return self._assignment.new_evaluation()  # reads the test split, which the first step need not wait for

    def _results(self) -> dict[str, float]:
        return self._evaluation()

    @property
    def _enough(self) -> bool:
        return self._hooks is not None and self._hooks.enough

    def _any_enough(self) -> bool:
        """Return whether any task's callbacks want training to end; all tasks call it at the same step."""
        return self._agree(steps.Signals(stop=self._enough)).stop

    def _record_work(self, worker: int, step: int) -> None:
        """Record that a worker of parameter servers has done its part of the steps until this one."""
        self._worked[worker].done(step)

    def _tell(self, progress: loops.Progress) -> None:
        result = progress.result
        self._report.steps(
            progress.first,
            result.losses,
            result.scores,
            progress.seconds,
            compiled=progress.compiled,
            times=result.times,
        )

    def _save(self, step: int) -> None:
        with self._report.saving():
            self._checkpoint.save(step)
        self._save_timer.saved()
        self._saved_at = step

    def _evaluate(self, step: int) -> None:
        self._report.evaluate(step, self._results)
        self._evaluated_at = step

    def _end_epoch(self, step: int) -> bool:
        """Tell the callbacks; return whether training shall end, which all tasks decide together."""
        assert self._hooks is not None
        self._hooks.end_epoch(step, self._report.results)
        if self._any_enough():
            self._hooks.enough = True
            return True
        self._hooks.begin_epoch(step)
        return False
