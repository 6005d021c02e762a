"""The evaluator task: evaluates every new checkpoint beside the training, on a device of its own."""

from __future__ import annotations

import tensorflow as tf

from train import checkpoint
from train.assignment import Assignment
from train.metrics import Metrics

POLL_S = 0.5


def evaluate_checkpoints(assignment: Assignment) -> None:
    """Evaluate each checkpoint as it appears, until a stop; then the newest one if it was not yet."""
    run, heartbeat, stop = assignment.run, assignment.heartbeat, assignment.stop
    metrics = Metrics(run, assignment.task.name, talks=True)
    evaluate = assignment.new_evaluation()
    seen = -1
    heartbeat.update(state="evaluating")
    while True:
        last = stop.is_set()
        newest = next(iter(checkpoint.finished(run.checkpoints)), None)
        if newest and newest.step > seen:
            step = newest.step
            try:
                tf.train.Checkpoint(model=assignment.model).read(newest.prefix).expect_partial()
            except tf.errors.NotFoundError:
                continue  # a newer checkpoint has just pushed this one out
            results = evaluate()
            epoch = assignment.config.epoch(step, assignment.source.train_examples)
            metrics.log(step, epoch, step, dict(results))
            metrics.flush()
            run.event("evaluator", "evaluated", step=step, results=results)
            heartbeat.update(step=step, loss=results["eval_loss"])
            seen = step
        elif last:
            return
        else:
            stop.wait(POLL_S)
