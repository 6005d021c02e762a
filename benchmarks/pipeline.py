"""Two stages with one core each: the speedup by more micro-batches, and the memory of each schedule."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import Bench, cores
from benchmarks.scaling import start_pinned
from cluster.contract.run.folder import RunFolder
from cluster.host.options.request import Request
from cluster.host.runtime import supervisor
from cluster.system.errors import PrerequisiteError
from cluster.system.json_files import read_json

STEPS = 6
BATCH, LAYERS, WIDTH, CONTEXT = 128, 4, 256, 64
MICRO_BATCHES = {1: None, 4: Goal(1.5, at_least=True), 8: None, 16: None, 32: Goal(1.8, at_least=True)}
"""M, and the goal for its throughput over that of M = 1; the formula allows 1.6 and 1.94."""
OVER_ONE_TASK = {4: None, 32: Goal(1.7, at_least=True)}
"""M, and the goal for two stages over one task of one core; the formula allows 1.6 and 1.94."""

MEMORY_STAGES, MEMORY_MICRO_BATCHES, MEMORY_SCHEDULES = 4, 8, ("1f1b", "gpipe", "gpipe --remat")
MEMORY_STEPS = 3
"""Every step takes the same memory."""


def measure(bench: Bench) -> list[Figure]:
    """Train two stages with each number of micro-batches in turn, and one task with the same.

    Raises:
        PrerequisiteError: there are fewer than two cores.
    """
    if cores() < 2:
        raise PrerequisiteError(f"pipeline: {cores()} core, expected 2; measure it on another machine, see --only")
    chosen = dict(list(MICRO_BATCHES.items())[:2]) if bench.quick else MICRO_BATCHES
    counts = [(2, m) for m in chosen] + [(1, m) for m in chosen if m in OVER_ONE_TASK]
    rates: dict[tuple[int, int], list[float]] = {each: [] for each in counts}
    for turn in bench.turns():
        for (stages, micro_batches), samples in rates.items():
            name, batch = f"pipeline-{turn}-{stages}-{micro_batches}", BATCH // 4 if bench.quick else BATCH
            run = start(bench, name, stages, micro_batches, batch=batch)
            try:
                samples.append(rate(bench, run))
            finally:
                supervisor.kill_run(run)
            bench.log(f"    {stages} stages, M = {micro_batches}: {samples[-1]:.1f} examples/s")
    return [*_measured(rates, chosen), _measure_memory(bench)]


def _measured(rates: dict[tuple[int, int], list[float]], chosen: dict[int, Goal | None]) -> list[Figure]:
    figures = []
    for micro_batches, goal in chosen.items():
        two = rates[2, micro_batches]
        if micro_batches > 1:
            figures.append(_over(f"pipeline-m{micro_batches}", f"M={micro_batches}", two, "M=1", rates[2, 1], goal))
        if micro_batches in OVER_ONE_TASK:
            name, one = f"pipeline-k2-m{micro_batches}", rates[1, micro_batches]
            against = OVER_ONE_TASK[micro_batches]
            figures.append(_over(name, f"2 stages, M={micro_batches}", two, "1 stage", one, against))
    return figures


def _measure_memory(bench: Bench) -> Figure:
    """Train a few steps with each schedule in turn."""
    peaks: dict[str, list[float]] = {name: [] for name in MEMORY_SCHEDULES}
    for turn in bench.turns():
        for name, samples in peaks.items():
            order, *remat = name.split()
            run_name = f"memory-{turn}-{order}-{len(remat)}"
            run = start(
                bench, run_name, MEMORY_STAGES, MEMORY_MICRO_BATCHES, order, remat=bool(remat), batch=64, context=128
            )
            try:
                bench.await_step(run, MEMORY_STEPS)
                samples.append(_peak_mib(run))
            finally:
                supervisor.kill_run(run)
            bench.log(f"    {name}: {samples[-1]:.0f} MiB")
    title = (
        f"peak memory of stage 0 of {MEMORY_STAGES}, M={MEMORY_MICRO_BATCHES}: 1f1b, which holds {MEMORY_STAGES} "
        f"micro-batches, over gpipe, which holds {MEMORY_MICRO_BATCHES}"
    )
    return Figure("pipeline-memory", title, "MiB", peaks, ratios(peaks["1f1b"], peaks["gpipe"]), "times")


def _peak_mib(run: RunFolder) -> float:
    """Return the peak memory of the first stage's process, including TensorFlow's own."""
    pid = read_json(run.programs("chief"))["program"]["pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def _over(name: str, ours: str, samples: list[float], theirs: str, others: list[float], goal: Goal | None) -> Figure:
    title = f"examples/s of a Transformer, {ours} over {theirs}, one core a stage"
    return Figure(name, title, "examples/s", {ours: samples, theirs: others}, ratios(samples, others), "times", goal)


def start(
    bench: Bench,
    name: str,
    stages: int,
    micro_batches: int,
    order: str = "1f1b",
    *,
    remat: bool = False,
    batch: int = BATCH,
    context: int = CONTEXT,
) -> RunFolder:
    """Start a run with a core for each stage; if there are more stages than cores, several share one."""
    size = (f"--transformer.layers={LAYERS}", f"--transformer.width={WIDTH}", f"--transformer.context={context}")
    request = Request(
        strategy="pipeline",
        stages=stages,
        schedule=order,
        remat=remat,
        micro_batches=micro_batches,
        preset="transformer_lm",
        runtime="local",
        name=name,
        fresh=True,
        tensorboard_port="0",
        checkpoint_every=str(10**9),
        overrides=[
            *size,
            f"--global-batch={batch}",
            "--threads=1",
            "--steps-per-loop=2",
            "--log-every=1",
            "--evaluate-every=1000000000",
            "--epochs=1000000",
        ],
    )
    own = sorted(os.sched_getaffinity(0))
    return start_pinned(bench, request, [own[at % len(own)] for at in range(stages)])


def rate(bench: Bench, run: RunFolder) -> float:
    """Return the examples per second of a run, the median of its calls except the first, which compiles."""
    return float(median(row["examples_per_s"] for row in bench.await_step(run, STEPS) if row["examples_per_s"]))
