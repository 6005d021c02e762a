"""The evaluator task, which evaluates new checkpoints during the training on a separate device."""

import sys

import tensorflow as tf

from cluster.contract.recovery.checkpoint_files import Saved, list_finished
from cluster.system.json_files import read_json_lines
from train.context import TaskContext
from train.saving import saved_weights
from train.telemetry.metrics import Metrics

POLL_S = 0.5


def evaluate_checkpoints(context: TaskContext) -> None:
    """Evaluate new checkpoints until the task is stopped, and then the newest one if it is still new."""
    run, heartbeat, stop, name = context.run, context.heartbeat, context.stop, context.task.name
    metrics = Metrics(run, name, prints=True, resumed_at=sys.maxsize)
    evaluate = context.new_evaluation()
    done = {row["step"] for row in read_json_lines(run.metrics(name))}  # also by previous generations
    unreadable: set[tuple[int, int] | None] = set()
    heartbeat.update(state="evaluating")
    while True:
        last = stop.is_set() or run.outcome is not None  # a SIGTERM during the start was ignored
        readable = (saved for saved in list_finished(run.checkpoints) if _written(saved) not in unreadable)
        if (saved := next(readable, None)) and saved.step not in done:  # older ones no longer matter
            if (damage := saved.damage()) is None:
                try:
                    saved_weights.load_evaluated(context.config, context.model, saved.prefix)
                except (tf.errors.OpError, OSError):  # a newer checkpoint may have replaced it
                    damage = "TensorFlow cannot read it"
            if damage:
                if written := _written(saved):  # otherwise a newer one has just replaced it
                    unreadable.add(written)  # so that it is read once, not twice a second
                    print(
                        f"warning: checkpoint of step {saved.step} is damaged ({damage}) and not evaluated", flush=True
                    )
                continue
            results = evaluate()
            epoch = context.config.epoch(saved.step, context.source.train_examples)
            metrics.log(saved.step, epoch, saved.step, dict(results))
            metrics.flush()
            run.event("evaluator", "evaluated", step=saved.step, results=results)
            heartbeat.update(step=saved.step, loss=results["eval_loss"])
            done.add(saved.step)
        elif last:
            return
        else:
            stop.wait(POLL_S)


def _written(saved: Saved) -> tuple[int, int] | None:
    """Return a key that distinguishes checkpoints of the same step; None if it is deleted."""
    try:
        return saved.step, saved.record.stat().st_mtime_ns
    except FileNotFoundError:
        return None
