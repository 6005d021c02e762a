"""The training program of one task with every step marked: the times are in `marks/TASK.jsonl` in the run folder.

python -m benchmarks.marked RUN_DIR

A line is one call of the loop: `{"computed": [...], "summed": [...]}`, the times at which each step's own gradients and
their sum over the tasks were computed, in seconds of the clock that all processes of a machine share. No computation
waits for a mark.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cluster.contract.run.folder import RunFolder

COMPUTED, SUMMED = "computed", "summed"


def mark(run: RunFolder, task: str) -> None:
    """Patch the sum of the gradients and the loop's timer, so that every step leaves its marks."""
    import tensorflow as tf

    from train.model.gradients import GradientPolicy
    from train.telemetry.step_timer import StepTimer

    path = run.path / "marks" / f"{task}.jsonl"
    path.parent.mkdir(exist_ok=True)
    moments: dict[str, list[float]] = {COMPUTED: [], SUMMED: []}
    add_up, take = GradientPolicy.sum, StepTimer.take

    def note(what: str) -> Callable[[], np.ndarray]:
        def noted() -> np.ndarray:
            moments[what].append(time.perf_counter())
            return np.zeros((), np.int32)

        return noted

    def marked_sum(policy: GradientPolicy, gradients: Any) -> list[Any]:
        sums = add_up(policy, gradients)
        for what, tensors in ((COMPUTED, gradients), (SUMMED, sums)):
            with tf.control_dependencies([each for each in tensors if each is not None]):
                tf.numpy_function(note(what), [], tf.int32)
        return sums

    def written(timer: StepTimer, count: int, seconds: float) -> Any:
        with path.open("a") as file:
            print(json.dumps(moments), file=file)
        for each in moments.values():
            each.clear()
        return take(timer, count, seconds)

    GradientPolicy.sum, StepTimer.take = marked_sum, written  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    from train.__main__ import train
    from train.startup import preload

    run = RunFolder(Path(sys.argv[1]))
    preload.load(run.load_config(), run.load_cluster().strategy)
    mark(run, os.environ["TASK"])
    os._exit(train(run))
