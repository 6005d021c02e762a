"""The evaluator task: evaluates every new checkpoint beside the training, on a device of its own."""

from __future__ import annotations

import threading

import keras
import tensorflow as tf

from cluster.runs import Heartbeat, RunFolder
from train import checkpoint, steps
from train.data import memory
from train.metrics import Metrics

POLL_S = 0.5


def evaluate_checkpoints(
    run: RunFolder,
    model: keras.Model,
    tensors: memory.Examples,
    metrics: Metrics,
    heartbeat: Heartbeat,
    stop: threading.Event,
) -> None:
    """Evaluate each checkpoint as it appears, until `stop`; then the newest one if it was not yet."""
    evaluate = steps.evaluation(tf.distribute.get_strategy(), model, tensors, batch=500)
    seen = -1
    heartbeat.update(state="evaluating")
    while True:
        last = stop.is_set()
        newest = checkpoint.newest(run.checkpoints)
        if newest and newest[1] > seen:
            path, step = newest
            try:
                tf.train.Checkpoint(model=model).restore(path).expect_partial()
            except tf.errors.NotFoundError:
                continue  # a newer checkpoint has just pushed this one out
            results = evaluate()
            metrics.log(step, 0.0, step, dict(results))
            metrics.flush()
            run.event("evaluator", "evaluated", step=step, results=results)
            heartbeat.update(step=step, loss=results["eval_loss"])
            seen = step
        elif last:
            return
        else:
            stop.wait(POLL_S)
