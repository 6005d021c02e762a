"""The evaluator task: evaluates every new checkpoint beside the training, on a device of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.system.journal import read_json_lines
from train.config import TrainConfig
from train.context import TaskContext
from train.saving import weights
from train.saving.files import Saved, finished
from train.telemetry import sinks
from train.telemetry.metrics import Metrics

POLL_S = 0.5


def evaluate_checkpoints(context: TaskContext) -> None:
    """Evaluate each checkpoint as it appears, until a stop; then the newest one if it was not yet."""
    run, heartbeat, stop = context.run, context.heartbeat, context.stop
    name = context.task.name
    to = sinks.build(context.config, run, name, sys.maxsize, chief=False)
    metrics = Metrics(run, name, prints=True, resumed_at=sys.maxsize, sinks=to)
    evaluate = context.new_evaluation()
    new = NewCheckpoints(run.checkpoints, {row["step"] for row in read_json_lines(run.metrics(context.task.name))})
    heartbeat.update(state="evaluating")
    while True:
        last = stop.is_set()
        saved = new.newest()
        if saved and not restore(context.config, context.model, saved):
            new.pass_over(saved, "TensorFlow cannot read it")
        elif saved:
            results = evaluate()
            epoch = context.config.epoch(saved.step, context.source.train_examples)
            metrics.log(saved.step, epoch, saved.step, dict(results))
            metrics.flush()
            run.event("evaluator", "evaluated", step=saved.step, results=results)
            heartbeat.update(step=saved.step, loss=results["eval_loss"])
            new.done.add(saved.step)
        elif last:
            return
        else:
            stop.wait(POLL_S)


class NewCheckpoints:
    """Finds the checkpoints that are still to be evaluated."""

    def __init__(self, folder: Path, done: set[int]) -> None:
        """Begin where a previous generation ended.

        Args:
            folder: of the checkpoints.
            done: steps whose checkpoints were evaluated.
        """
        self.done = done
        self._folder = folder
        self._bad: set[tuple[int, int]] = set()

    def newest(self) -> Saved | None:
        """Return the newest good checkpoint, unless it was evaluated: older ones do not matter any more."""
        for saved in finished(self._folder):
            if saved.step in self.done:
                return None
            if _written(saved) in self._bad:
                continue
            if (damage := saved.damage()) is None:
                return saved
            self.pass_over(saved, damage)
        return None

    def pass_over(self, saved: Saved, why: str) -> None:
        """Leave out a checkpoint that cannot be read: one that a newer one has just pushed out is not worth a word."""
        if written := _written(saved):
            self._bad.add(written)  # so that it is read whole once, not twice a second
            print(f"warning: checkpoint of step {saved.step} is damaged ({why}) and not evaluated", flush=True)


def _written(saved: Saved) -> tuple[int, int] | None:
    """Return what distinguishes a checkpoint from another one of the same step; None where it is gone."""
    try:
        return saved.step, saved.record.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def restore(config: TrainConfig, model: keras.Model, saved: Saved) -> bool:
    """Restore a model's weights; return whether they could be read: the checkpoint may just have been pushed out."""
    try:
        weights.read(config, model, saved.prefix)
    except (tf.errors.OpError, OSError):
        return False
    return True
