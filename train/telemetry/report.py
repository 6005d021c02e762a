"""The reports of a task about its training: heartbeat, events, metrics and, at the end, the result."""

import contextlib
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from cluster.contract.compatibility import precision_of
from cluster.contract.recovery.checkpoint_files import Saved
from cluster.contract.recovery.step_record import StepRecord
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HEARTBEAT_S
from cluster.contract.run.records import Place
from cluster.system.json_files import write_json
from train.context import TaskContext
from train.loops.loop import Action, CallProgress
from train.model import export, optimizers
from train.model.gradients import GradientPolicy
from train.pipeline.stage_models import as_trained, to_restore
from train.saving import saved_weights
from train.saving.checkpoint import CheckpointManager
from train.saving.timer import SaveTimer
from train.telemetry.metrics import Metrics
from train.telemetry.step_timer import StepTiming

LEDGER_EVERY_S = 1.0
"""Interval between two writes of the ledger."""


class Report(Action):
    """Writes the progress of one generation's training to the run folder."""

    def __init__(self, context: TaskContext, first: int, policy: GradientPolicy, source: str = "") -> None:
        """Report a training from step `first`, whose state was restored from `source`, if any."""
        self._loss_scale, self._optimizer = policy.loss_scale, policy.optimizer
        self._context, self._config = context, context.config
        self._heartbeat = context.heartbeat
        self._timing, self._timing_shown_at = StepTiming(), 0.0
        generation = self._heartbeat.current.generation
        self._ledger = LedgerWriter(context.run, generation, first, source, writes=context.chief)
        self.done = StepRecord(context.run, context.task.name, generation).done
        """Records the steps done immediately, because the next one may end this process."""
        self._train_seconds = 0.0
        self._timed_steps = 0
        self.results: dict[str, float] = {}
        self.evaluated_at = -1
        """Steps done at the evaluation of `results`."""
        run, name = context.run, context.task.name
        if context.chief:
            (run.control / "result.json").unlink(missing_ok=True)  # a previous generation may have written it
            if source:
                run.event(name, "restored", step=first, source=source)
            else:
                run.event(name, "initialized", step=first)
            self._heartbeat.update(steps_total=context.total_steps)
        self.metrics = Metrics(run, name, prints=context.chief, resumed_at=first)
        self._heartbeat.update(state="compiling", step=first)

    def after(self, progress: CallProgress) -> None:
        first, values, seconds = progress.first, progress.result.values, progress.seconds
        losses, step = progress.result.losses, progress.step
        self.done(step)
        rate = None
        if progress.compiled:
            # Written immediately, so that a failure now counts for this generation.
            self._heartbeat.update(state="training", step=step)
            self._ledger.first_step(step)
            if self._context.chief:
                self._context.run.event(self._context.task.name, "first step", step=step)
        else:
            self._train_seconds += seconds
            self._timed_steps += len(losses)
            rate = len(losses) * self._config.global_batch / seconds
            times = progress.result.times
            if times is not None:
                self._timing.add(times)
                if time.monotonic() - self._timing_shown_at > HEARTBEAT_S / 2:
                    self._update_timing()
            self._ledger.steps(len(losses), seconds, seconds * times.input_share if times else 0.0)
        self._heartbeat.update(step=step, loss=float(losses[-1]), examples_per_s=rate)
        total = self._context.total_steps
        scale = {} if self._loss_scale is None else self._loss_scale.metrics()
        for at in range(first + 1, step + 1):
            if at % self._config.log_every == 0 or at == total:
                step_values = {name: float(values_S[at - first - 1]) for name, values_S in values.items()}
                self.metrics.log(at, self._epoch(at), total, {**step_values, "examples_per_s": rate, **scale})

    def save(self, step: int, checkpoint: CheckpointManager, timer: SaveTimer) -> None:
        """Save a checkpoint, and report how long the training waited for it; `checkpoint` reports its completion."""
        with self._ledger.spending("save"):
            began = time.perf_counter()
            self._heartbeat.update(state="saving")
            checkpoint.save(step)
            cost_s = time.perf_counter() - began
            if timer.waits:
                checkpoint.wait()
            self._heartbeat.update(state="training")
            timer.saved(cost_s, checkpoint.writing_s)
            self._ledger.record["saves"] = timer.saves

    def evaluate(self, step: int, evaluation: Callable[[], dict[str, float]]) -> None:
        context = self._context
        averaged = optimizers.with_averages(self._config, context.model, self._optimizer)
        with self._ledger.spending("evaluate"), averaged, self.evaluating():
            context.positions.set(Place.EVALUATION, step)
            self.results, self.evaluated_at = evaluation(), step
            context.positions.set(Place.EVALUATION, step, left=True)
            if context.chief:
                self.metrics.log(step, self._epoch(step), context.total_steps, dict(self.results))
            self.metrics.shares(step, self._timing.generation())

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Report the state `evaluating`, in which a task may take long, until the end of the block."""
        before = self._heartbeat.current.state
        self._heartbeat.update(state="evaluating")
        yield
        self._heartbeat.update(state=before)

    def end(self, step: int, *, stopped: bool) -> None:
        """Export the model unless the training was stopped, and write the result. The chief leaves the cluster last."""
        context, result = self._context, self._context.run.control / "result.json"
        divided = context.task_stages is not None and not context.task_stages.whole
        # On every task, because reading a moving average that is a mean over all tasks is a collective operation.
        averaged = optimizers.with_averages(self._config, context.model, self._optimizer)
        with contextlib.nullcontext() if divided else averaged:
            weights = [] if stopped or divided else saved_weights.read_values(context.model)
        if context.chief:
            model, trained = None, context.model
            if divided:  # only the checkpoint of this step has the whole model
                model = trained = to_restore(context.new_model)
                built = as_trained(context.new_model, precision_of(context.spec.strategy, self._config.precision))
                saved_weights.load_trained(model, Saved(context.run.checkpoints, step).prefix, built)
            digest = saved_weights.weights_sha256(trained)
            if not stopped:
                self._heartbeat.update(state="saving")
                exported = model or context.new_model()
                if weights:
                    saved_weights.assign_values(exported, weights)
                else:  # the model has those of a pipeline's checkpoint
                    saved_weights.load_averages(self._config, exported, Saved(context.run.checkpoints, step).prefix)
                source = context.source
                export.export(exported, context.run.export, source.feature_shape, source.named_outputs)
                context.run.event(context.task.name, "exported", step=step)
                self.metrics.hparams(self._config, self.results)
            rate = self._timed_steps * self._config.global_batch / self._train_seconds if self._train_seconds else None
            package = "tf_keras" if export.is_legacy() else "keras"
            described = {
                "keras": f"{package} {version(package)}",
                "steps": step,
                "epochs": round(self._epoch(step), 4),
                "examples_per_s": rate and round(rate, 1),
                "metrics": self.results if self.evaluated_at == step else {},  # not those of an earlier step
                "weights_sha256": digest,
            }
            write_json(result, described)
        self._update_timing()
        self.metrics.shares(step, self._timing.generation())
        self.metrics.flush()
        self._heartbeat.update(state="stopped" if stopped else "done", step=step)
        while not context.chief and not result.exists() and not context.run.outcome:
            time.sleep(0.02)  # the chief's coordination service regards a task that leaves early as lost

    def _update_timing(self) -> None:
        if self._timing.steps:
            self._heartbeat.update(**self._timing.recent(), pace=self._timing.generation())
        self._timing_shown_at = time.monotonic()

    def _epoch(self, step: int) -> float:
        return self._config.epoch(step, self._context.source.train_examples)


class LedgerWriter:
    """Records the chief's time in one generation in the run folder, where it survives a kill of the chief."""

    def __init__(self, run: RunFolder, generation: int, first: int, source: str, *, writes: bool) -> None:
        self._path, self._writes = run.ledger(generation), writes
        self._seconds = {"input": 0.0, "compute": 0.0, "save": 0.0, "evaluate": 0.0}
        self.record: dict[str, Any] = {"generation": generation, "began": time.time(), "first_step_at": None}
        self.record |= {"first": first, "restored_from": source, "saves": {}, "seconds": self._seconds}
        self.record |= {"step": first, "timed_steps": 0}
        self._written = 0.0
        self._write()

    def first_step(self, step: int) -> None:
        """Record the end of the first step, which includes tracing and compiling."""
        self.record |= {"first_step_at": time.time(), "step": step}
        self._write()

    def steps(self, count: int, seconds: float, input_s: float) -> None:
        """Record further steps, their seconds, and the seconds of waiting for input."""
        self.record["step"] += count
        self.record["timed_steps"] += count
        self._seconds["input"] += input_s
        self._seconds["compute"] += seconds - input_s
        if time.monotonic() - self._written > LEDGER_EVERY_S:
            self._write()

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time inside as `save` or `evaluate`."""
        began = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - began
        self._write()

    def _write(self) -> None:
        if self._writes:
            with contextlib.suppress(OSError):  # a full disk is reported elsewhere
                write_json(self._path, self.record | {"updated_at": time.time()})
        self._written = time.monotonic()
