"""Two stages with one core each: what more micro-batches bring, against the bubble's formula and one task.

K = 2 is measured on two cores; K = 4 and 8 are simulated from the time of a stage, see `train/pipeline/schedule.py`.
"""

from __future__ import annotations

import os

from benchmarks.figures import Figure, Goal, ratios, step_seconds
from benchmarks.runs import Bench, cores
from benchmarks.scaling import start_pinned
from cluster.errors import PrerequisiteError
from cluster.options.request import Request
from cluster.runtime.local import supervisor

STEPS = 30
BATCH, LAYERS, WIDTH, CONTEXT = 64, 4, 256, 128
MICRO_BATCHES = {1: None, 4: Goal(1.5, at_least=True), 32: Goal(1.8, at_least=True)}
"""M, and the goal for its throughput over that of M = 1; the formula allows 1.6 and 1.94."""


def measure(bench: Bench) -> list[Figure]:
    """Train two stages with each number of micro-batches in turn, and one task with the same.

    Raises:
        PrerequisiteError: there are no two cores.
    """
    if cores() < 2:
        raise PrerequisiteError(f"pipeline: {cores()} core, expected 2; measure it on another machine, see --only")
    steps = bench.steps(STEPS)
    rates: dict[tuple[int, int], list[float]] = {(stages, m): [] for m in MICRO_BATCHES for stages in (1, 2)}
    for turn in bench.turns():
        for (stages, micro_batches), samples in rates.items():
            name = f"pipeline-{turn}-{stages}-{micro_batches}"
            samples.append(_rate(bench, name, stages, micro_batches, steps))
    figures = []
    for micro_batches, goal in MICRO_BATCHES.items():
        two, one = rates[2, micro_batches], rates[1, micro_batches]
        if goal:
            figures.append(_over(f"pipeline-m{micro_batches}", f"M={micro_batches}", two, "M=1", rates[2, 1], goal))
        figures.append(
            _over(f"pipeline-k2-m{micro_batches}", f"2 stages, M={micro_batches}", two, "1 stage", one, None)
        )
    return figures


def _over(name: str, ours: str, samples: list[float], theirs: str, others: list[float], goal: Goal | None) -> Figure:
    title = f"examples/s of a Transformer, {ours} over {theirs}, one core a stage"
    return Figure(name, title, "examples/s", {ours: samples, theirs: others}, ratios(samples, others), "times", goal)


def _rate(bench: Bench, name: str, stages: int, micro_batches: int, steps: int) -> float:
    """Return the examples a second of one run, and end it."""
    size = (f"--transformer.layers={LAYERS}", f"--transformer.width={WIDTH}", f"--transformer.context={CONTEXT}")
    request = Request(
        strategy="pipeline",
        stages=str(stages),
        schedule="1f1b",
        micro_batches=str(micro_batches),
        preset="transformer_lm",
        runtime="local",
        name=name,
        fresh=True,
        tensorboard_port="0",
        checkpoint_every=str(10**9),
        overrides=[
            *size,
            f"--global-batch={BATCH}",
            "--threads=1",
            "--steps-per-loop=5",
            "--log-every=1",
            "--evaluate-every=1000000000",
            f"--max-steps={10**6}",
        ],
    )
    run = start_pinned(bench, request, sorted(os.sched_getaffinity(0)))
    try:
        return BATCH / step_seconds(bench.await_step(run, steps))
    finally:
        supervisor.kill(run)
