"""The cost of agent, heartbeat, metrics and a checkpoint every 100 steps, against the bare training program."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import ENDLESS, ROOT, TRAINING, Bench
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.system.json_files import write_json

STEPS, FIRST = 350, 50
"""The last timed step, and the step after which the timing begins."""
LOG_EVERY = 10
CHECKPOINT_EVERY = 100
WITH, WITHOUT = "with", "without"


def measure(bench: Bench) -> list[Figure]:
    """Train alternately with and without these."""
    last = 3 * FIRST if bench.quick else STEPS
    seconds: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for turn in bench.turns():
        more = [f"--checkpoint-every={CHECKPOINT_EVERY}"]
        rows = bench.train(f"with-{turn}", "--workers=0", *more, steps=last, overrides=[f"--log-every={LOG_EVERY}"])
        seconds[WITH].append(between(rows, FIRST, last))
        seconds[WITHOUT].append(between(_bare(bench, f"without-{turn}", last), FIRST, last))
    cost = ratios(seconds[WITH], seconds[WITHOUT])
    title = f"cost of agent, heartbeat, metrics and checkpoints every {CHECKPOINT_EVERY} steps"
    unit = f"s for {last - FIRST} steps"
    return [Figure("telemetry", title, unit, seconds, cost, "cost", Goal(0.03, at_least=False))]


def between(rows: list[dict[str, Any]], first: int, last: int) -> float:
    """Return the seconds from one step to another, including the expensive steps that a median would leave out."""
    times = {row["step"]: row["time"] for row in rows}
    return float(times[last] - times[first])


def _bare(bench: Bench, name: str, last: int) -> list[dict[str, Any]]:
    overrides = [*TRAINING, f"--max-steps={ENDLESS}", f"--log-every={FIRST}"]
    planned = planning.plan(
        Request(
            workers=0,
            runtime="local",
            name=name,
            fresh=True,
            tensorboard_port="0",
            checkpoint_every=str(ENDLESS),
            overrides=overrides,
        )
    )
    run = planned.run
    run.create()
    write_json(run.config, planned.config)
    write_json(run.cluster, planned.cluster.to_json())
    program = _program(run)
    try:
        return bench.await_step(run, last)
    finally:
        program.kill()
        program.wait()


def _program(run: RunFolder) -> subprocess.Popen[bytes]:
    with run.log("chief").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare", str(run.path)],
            cwd=ROOT,
            env=os.environ | {"TASK": "chief", "RUN_DIR": str(run.path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
