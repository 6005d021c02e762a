"""Two tasks with one core each against one task with one core, and the limit that this machine's cores set."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.figures import Figure, Goal, ratios, step_seconds
from benchmarks.runs import ENDLESS, GLOBAL_BATCH, TRAINING, Bench
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import supervisor
from cluster.system.errors import PrerequisiteError

STEPS = 100
ONE, SAME_BATCH, SAME_SHARE = "chief", "chief and 1 worker", "chief and 1 worker, twice the batch"
ONE_LARGE, LARGE = "chief, 4 times the batch", "chief and 1 worker, 8 times the batch"
APART = "2 chiefs at once that know nothing of each other"
GOAL = Goal(0.95, at_least=True)


def measure(bench: Bench) -> list[Figure]:
    """Train on one core and on two, alternately.

    Raises:
        PrerequisiteError: there are fewer than two cores.
    """
    own = own_cores("scaling")
    steps = bench.steps(STEPS)
    layouts = {ONE: (0, 1), SAME_SHARE: (1, 2), SAME_BATCH: (1, 1), ONE_LARGE: (0, 4), LARGE: (1, 8)}
    rates: dict[str, list[float]] = {name: [] for name in (*layouts, APART)}
    for turn in bench.turns():
        for number, (name, (workers, batches)) in enumerate(layouts.items()):
            run = start(bench, f"scaling-{turn}-{number}", workers, batches, own)
            rates[name].append(batches * _rate(bench, [run], steps))
        chiefs = [start(bench, f"scaling-{turn}-chief-{core}", 0, 1, [core]) for core in own[:2]]
        rates[APART].append(_rate(bench, chiefs, steps))
    return [
        _figure("scaling", SAME_SHARE, rates, GOAL),
        _figure("scaling-same-batch", SAME_BATCH, rates, GOAL),
        _figure("scaling-large-batch", LARGE, rates, GOAL, one=ONE_LARGE),
        _figure("scaling-apart", APART, rates, None),
        against_apart(rates),
    ]


def against_apart(rates: Mapping[str, list[float]]) -> Figure:
    """Return the rate of two tasks together over that of two apart: cores may share units, caches and their clock."""
    title = f"examples/s of {SAME_SHARE}, over those of {APART}, one core each"
    two, apart = rates[SAME_SHARE], rates[APART]
    return Figure("scaling-of-apart", title, "examples/s", {SAME_SHARE: two, APART: apart}, ratios(two, apart), "times")


def own_cores(name: str) -> list[int]:
    """Return the cores that this process may use, for the benchmark of this name.

    Raises:
        PrerequisiteError: there are fewer than two.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise PrerequisiteError(f"{name}: {len(found)} core, expected 2; measure it on another machine, see --only")
    return found


def _rate(bench: Bench, runs: Sequence[RunFolder], steps: int) -> float:
    """Return the total steps per second of runs that train at once, times a plain batch's examples; end the runs."""
    try:
        return sum(GLOBAL_BATCH / step_seconds(bench.await_step(run, steps)) for run in runs)
    finally:
        for run in runs:
            supervisor.kill_run(run)


def start(
    bench: Bench, name: str, workers: int, batches: int, own: Sequence[int], *, marked: bool = False
) -> RunFolder:
    """Start a training with each task pinned to one of these cores from its start.

    The global batch is `batches` times the usual one; `marked` steps leave their marks, see `marked.py`.
    """
    batch = batches * GLOBAL_BATCH
    overrides = [*TRAINING, f"--max-steps={ENDLESS}", "--threads=1", f"--global-batch={batch}"]
    request = Request(
        workers=workers, runtime="local", name=name, fresh=True, tensorboard_port="0", overrides=overrides
    )
    return start_pinned(bench, request, own, "benchmarks.marked" if marked else "")


def start_pinned(bench: Bench, request: Request, own: Sequence[int], program: str = "") -> RunFolder:
    """Start a run of local processes with each task pinned to one of these cores from its start.

    Every task runs the module `program` on the run's folder, or the training program if none is named.
    """
    planned = planning.plan(request)
    words = ["--", sys.executable, "-m", program, str(planned.run.path)] if program else []
    tasks = {
        task: how
        | {
            "command": ["taskset", "--cpu-list", str(core), *how["command"], *words],
            "environment": how["environment"] | {"STANDBY": "0"},
        }
        for core, (task, how) in zip(own, planned.compose["tasks"].items(), strict=False)
    }
    planned = dataclasses.replace(planned, compose=planned.compose | {"tasks": tasks, "preload": ""})  # no forks
    startup.start(planned, lambda command: bench.call(["bash", "-c", command]), began=time.time())
    return planned.run


def _figure(name: str, two: str, rates: dict[str, list[float]], goal: Goal | None, one: str = ONE) -> Figure:
    title = f"examples/s of {two} over twice those of a {one}, one core each"
    halves = [ratio / 2 for ratio in ratios(rates[two], rates[one])]
    return Figure(name, title, "examples/s", {two: rates[two], one: rates[one]}, halves, "times", goal)
