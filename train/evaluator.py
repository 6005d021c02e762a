"""The evaluator task, which evaluates new checkpoints during the training on a separate device."""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf

from cluster.system.json_files import read_json_lines
from train.context import TaskContext
from train.saving import saved_weights
from train.saving.checkpoint_files import Saved, list_finished
from train.telemetry.metrics import Metrics

POLL_S = 0.5


def evaluate_checkpoints(context: TaskContext) -> None:
    """Evaluate new checkpoints until a stop, and then the newest one if necessary."""
    run, heartbeat, stop = context.run, context.heartbeat, context.stop
    name = context.task.name
    metrics = Metrics(run, name, prints=True, resumed_at=sys.maxsize)
    evaluate = context.new_evaluation()
    new = NewCheckpoints(run.checkpoints, {row["step"] for row in read_json_lines(run.metrics(context.task.name))})
    heartbeat.update(state="evaluating")
    while True:
        last = stop.is_set()
        if saved := new.newest():
            try:
                saved_weights.load_evaluated(context.config, context.model, saved.prefix)
            except (tf.errors.OpError, OSError):  # a newer checkpoint may have replaced it
                new.skip(saved, "TensorFlow cannot read it")
                continue
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
    """Finds checkpoints that have not been evaluated."""

    def __init__(self, folder: Path, done: set[int]) -> None:
        """Continue after a previous generation, which has evaluated the checkpoints of the steps `done`."""
        self.done = done
        self._folder = folder
        self._bad: set[tuple[int, int]] = set()

    def newest(self) -> Saved | None:
        """Return the newest intact checkpoint, unless it was evaluated; older ones no longer matter."""
        for saved in list_finished(self._folder):
            if saved.step in self.done:
                return None
            if _written(saved) in self._bad:
                continue
            if (damage := saved.damage()) is None:
                return saved
            self.skip(saved, damage)
        return None

    def skip(self, saved: Saved, why: str) -> None:
        """Skip an unreadable checkpoint; warn of it unless a newer one has just replaced it."""
        if written := _written(saved):
            self._bad.add(written)  # so that it is read once, not twice a second
            print(f"warning: checkpoint of step {saved.step} is damaged ({why}) and not evaluated", flush=True)


def _written(saved: Saved) -> tuple[int, int] | None:
    """Return a key that distinguishes checkpoints of the same step; None if it is deleted."""
    try:
        return saved.step, saved.record.stat().st_mtime_ns
    except FileNotFoundError:
        return None
