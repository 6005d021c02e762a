"""Training with either loop: setup, restore, actions and end."""

import functools
import os
from collections.abc import Callable

import tensorflow as tf

from cluster.contract.recovery import snapshot_files
from cluster.contract.run import membership
from cluster.contract.run.heartbeat import slow_timeout_s
from train.callbacks.callback_actions import Callbacks, CallEpochs
from train.context import TaskContext
from train.loops import steps
from train.loops.actions import CheckFinite, EndTraining, Evaluate, KeepSnapshot, Save, Trace
from train.loops.loop import Action, Stop
from train.loops.replica_check import FlipBit, ReplicaCheck, copied_variables
from train.saving.checkpoint import CheckpointManager, Encoded
from train.saving.snapshots import MemorySnapshots
from train.saving.trees import rate_variable
from train.telemetry.report import Report


class Setup:
    """The parts of a training that exist before the newest checkpoint is restored."""

    def __init__(self, context: TaskContext) -> None:
        self.context, config, task_stages = context, context.config, context.task_stages
        self.policy = context.new_policy()
        self.callback_state = Encoded("callbacks") if config.callbacks else None
        rate = rate_variable(self.policy.optimizer)
        self.rate = None if rate is None else float(tf.convert_to_tensor(rate))
        """The configured learning rate, before a checkpoint is restored; None if it is a schedule."""
        with context.strategy.scope():
            done = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
        self.checkpoint = CheckpointManager(
            context.model,
            self.policy.optimizer,
            done,
            context.run.checkpoints,
            keep=config.keep_checkpoints,
            writes=context.chief,
            saved=lambda step: context.run.event(context.task.name, "checkpoint", step=step),
            loss_scale=self.policy.loss_scale,
            callbacks=self.callback_state,
            joint=None if task_stages is None or task_stages.whole else task_stages.joint(slow_timeout_s(context.run)),
        )
        alone = context.asynchronous or len(context.spec.members) < 2
        self.gather: Callable[[int], list[int]] = (lambda number: [number]) if alone else steps.gathering(context.gang)
        """Collective operation: returns every task's number, given this task's."""
        self.snapshots: MemorySnapshots | None = None
        files = snapshot_files.descriptors(os.environ)
        if files and config.memory_snapshots and not context.asynchronous and not context.spec.kind.hardware:
            divided = task_stages is not None and not task_stages.whole
            broadcast = None if alone or divided else steps.broadcasting(context.gang)
            self.snapshots = MemorySnapshots(files, self.checkpoint.tree, self.gather, broadcast)
            placed = membership.cluster_with_addresses(context.run)
            self.snapshots.needs_chief = bool(config.callbacks)
            self.snapshots.sharing = placed.tasks_on_host(placed.task(context.task.name))

    def restore(self) -> int:
        """Restore the newest state that all tasks agree on, if there is one; return the number of its steps."""
        context, rate = self.context, rate_variable(self.policy.optimizer)
        self.checkpoint.generation = context.generation
        first = self.checkpoint.restore(self.gather, self.snapshots)
        if rate is not None and not context.config.callbacks and self.checkpoint.restored_from == "checkpoint":
            saved = float(tf.convert_to_tensor(rate))
            if saved != self.rate and context.chief:
                own = f"the {self.rate:g} of --optimizer.name {context.config.optimizer.name}"
                advice = "a function that uses its argument follows the run's rate"
                print(f"warning: the learning rate is the checkpoint's, {saved:g}, not {own}; {advice}", flush=True)
        return first


class Training:
    """One generation's training from step `first`, to the end or to a stop."""

    def __init__(self, setup: Setup, first: int, new_evaluation: Callable[[], Callable[[], dict[str, float]]]) -> None:
        """Prepare the actions, once a model with callbacks is compiled; `new_evaluation` makes the evaluation."""
        self._setup, self._context, self.first = setup, setup.context, first
        context, checkpoint = setup.context, setup.checkpoint
        self.report = Report(context, first, setup.policy, checkpoint.restored_from)
        self.trace = Trace(context.run, context.task.name)
        state = setup.callback_state
        self.callbacks = Callbacks(context, state, self.report, setup.rate) if state else None
        self._evaluate = Evaluate(context, self.report, new_evaluation, self.callbacks)
        # Every replica has a copy of these.
        variables = functools.partial(copied_variables, context.model, setup.policy)
        self._check = ReplicaCheck(context, variables, setup.gather, setup.snapshots)
        self.save = Save(context, self.report, checkpoint, first, self._prepare)
        self.keep = KeepSnapshot(self._keep_snapshot)
        # Under parameter servers the chief decides alone.
        self.agree: Callable[[steps.Signals], steps.Signals] = (
            (lambda signals: signals) if context.asynchronous else steps.agreement(context.gang)
        )
        """Collective function from this task's requests to the union of all tasks'; all call it at the same step."""

    def begin(self) -> None:
        self._check.compare(self.first, again=True)
        if self.callbacks:
            self.callbacks.begin(self.first, lambda: self._evaluate.catch_up(self.first))
        elif self.first and self._evaluate.next(self.first - 1) == self.first:
            # Without callbacks no checkpoint says whether the evaluation was done before the stop.
            results = self.report.metrics.evaluated
            if self._setup.gather(int(bool(results)))[0]:  # as the chief found, so that all tasks evaluate or none
                self.report.results, self.report.evaluated_at = results, self.first
        self._evaluate.catch_up(self.first)

    @property
    def finished(self) -> bool:
        return self.first >= self._context.total_steps or self._stops

    def actions(self, *, batches: bool) -> list[Action]:
        """Return the actions in order; without `batches`, the caller traces and calls the user's callbacks itself."""
        context = self._context
        # A difference in these lasts, as every replica updates its copies by itself.
        flip = FlipBit(context, lambda: [*context.model.trainable_variables, *self._setup.policy.optimizer.variables])
        actions = [
            flip if context.spec.copies_weights else None,
            self.trace if batches else None,
            self.callbacks if batches else None,  # before the check, to see a NaN loss
            CheckFinite(self._setup.policy, self._check.compare),
            self.report,
            EndTraining(context.total_steps, self._any_stops),
            self._evaluate,
            CallEpochs(context, self.callbacks, self._any_stops) if self.callbacks else None,
            self._check,
            self.save,  # last, to include changes by callbacks
            self.keep,
        ]
        return [action for action in actions if action is not None]

    def _prepare(self, step: int) -> None:
        """Compare replicas and store callbacks' state before a save."""
        self._check.compare(step)
        if self.callbacks:
            self.callbacks.store_state()

    def _keep_snapshot(self, step: int) -> float:
        """Keep the state in memory; return the seconds waited for slower tasks."""
        if self.callbacks:
            self.callbacks.store_state()
        if self._setup.snapshots:
            self._setup.checkpoint.keep_snapshot(step, self._setup.snapshots)
        return self._check.compare(step)  # last: if a task is lost during it, the others have their snapshots

    def request(self, count: int, until: int) -> steps.Signals:
        """Return the requests of this task, see `steps.Request`."""
        timer = self.save.timer
        keep = self._context.chief and self._setup.snapshots is not None and self.keep.due(until)
        return steps.Signals(self._context.stop.is_set() or self._stops, timer.due(until), timer.brief(count), keep)

    @property
    def _stops(self) -> bool:
        return self.callbacks is not None and self.callbacks.stops

    def _any_stops(self) -> bool:
        """Whether callbacks of any task end the training; all tasks call it at the same step."""
        return self.agree(steps.Signals(stop=self._stops)).stop

    def end(self, step: int, stop: Stop) -> None:
        stopped, report = stop is Stop.REQUESTED, self.report
        self._check.compare(step)  # callbacks may then change one task's weights alone, such as to the best ones
        if self.save.saved_at != step and (stopped or not self.callbacks):
            self.save.save(step)
        if not stopped and report.evaluated_at != step:
            self._evaluate.evaluate(step)
            self._check.compare(step, again=True)  # the evaluation took time, and the weights are exported next
        if self.callbacks:
            with report.evaluating():
                changed = self.callbacks.end(step, stopped=stopped)
                changed = not stopped and self.agree(steps.Signals(stop=changed)).stop
            if changed:  # without the callbacks, which have closed their files
                report.evaluate(step, self._evaluate.measure())
            if not stopped:
                self.save.save(step)  # callbacks may have changed weights at the end, such as to the best ones
        self._context.heartbeat.update(state="saving")  # writing the checkpoint may take longer than a step may
        self._setup.checkpoint.release()
        if self._context.task_stages and not self._context.task_stages.whole:
            self._context.task_stages.release()  # the chief needs memory for the whole model
        report.end(step, stopped=stopped)
