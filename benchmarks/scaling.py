"""Two tasks with one core each against one task with one core."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from benchmarks.figures import Figure, Goal, ratios, step_seconds
from benchmarks.runs import ENDLESS, GLOBAL_BATCH, TRAINING, Bench, cores
from cluster import launch, local, startup
from cluster.errors import PrerequisiteError
from cluster.request import Request

STEPS = 100
ONE, SAME_BATCH, SAME_SHARE = "chief", "chief and 1 worker", "chief and 1 worker, twice the batch"
GOAL = Goal(0.95, at_least=True)


def measure(bench: Bench) -> list[Figure]:
    """Train on one core and on two in turn.

    Raises:
        PrerequisiteError: there are no two cores.
    """
    if cores() < 2:
        raise PrerequisiteError(f"scaling: {cores()} core, expected 2; measure it on another machine, see --only")
    steps = bench.steps(STEPS)
    asked = {ONE: (0, 1), SAME_SHARE: (1, 2), SAME_BATCH: (1, 1)}
    rates: dict[str, list[float]] = {name: [] for name in asked}
    for turn in bench.turns():
        for number, (name, (workers, batches)) in enumerate(asked.items()):
            rows = _train(bench, f"scaling-{turn}-{number}", workers, batches * GLOBAL_BATCH, steps)
            rates[name].append(batches * GLOBAL_BATCH / step_seconds(rows))
    return [_figure("scaling", SAME_SHARE, rates), _figure("scaling-same-batch", SAME_BATCH, rates)]


def _train(bench: Bench, name: str, workers: int, batch: int, steps: int) -> list[dict[str, Any]]:
    """Train with one core for each task from its first moment on; return the chief's rows."""
    overrides = [*TRAINING, f"--max-steps={ENDLESS}", "--threads=1", f"--global-batch={batch}"]
    request = Request(
        workers=str(workers), runtime="local", name=name, fresh=True, tensorboard_port="0", overrides=overrides
    )
    planned = launch.plan(request)
    tasks = {
        task: told
        | {
            "command": ["taskset", "--cpu-list", str(core), *told["command"]],
            "environment": told["environment"] | {"WARM_SPARE": "0"},
        }
        for core, (task, told) in zip(sorted(os.sched_getaffinity(0)), planned.compose["tasks"].items(), strict=False)
    }
    planned = dataclasses.replace(planned, compose=planned.compose | {"tasks": tasks})
    startup.start(planned, lambda command: bench.call(["bash", "-c", command]), began=time.time())
    try:
        return bench.await_step(planned.run, steps)
    finally:
        local.kill(planned.run)


def _figure(name: str, two: str, rates: dict[str, list[float]]) -> Figure:
    title = f"examples/s of {two} over twice those of a chief, one core each"
    halves = [ratio / 2 for ratio in ratios(rates[two], rates[ONE])]
    return Figure(name, title, "examples/s", {two: rates[two], ONE: rates[ONE]}, halves, "times", GOAL)
