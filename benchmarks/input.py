"""The streaming source: its pipeline alone, against sequential reading, and how long a training waits for it."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import DATASET, GLOBAL_BATCH, Bench
from cluster.host.launch import folders
from cluster.system.json_files import read_json

BATCHES = 900
"""About three epochs: both read every shard again and again, from memory."""
OURS, NAIVE = "streaming source", "sequential reading"
MEMORY = "arrays in memory"
STEPS = 125


def measure(bench: Bench) -> list[Figure]:
    """Read with both pipelines alternately."""
    bench.invoke("data.shard", f"--name={DATASET}")  # does nothing if they exist
    batches = [f"--batches={bench.steps(BATCHES)}"]
    streaming = ["-m", "benchmarks.streaming", f"--data-dir={folders.data_dir()}", f"--name={DATASET}"]
    naive = ["-m", "benchmarks.baselines.sequential_input", f"--shards={bench.shards}"]
    rates: dict[str, list[float]] = {OURS: [], NAIVE: []}
    waits: dict[str, list[float]] = {OURS: [], MEMORY: []}
    for turn in bench.turns():
        for name, command in ((OURS, streaming), (NAIVE, naive)):
            steps = bench.rows([sys.executable, *command, *batches], TF_CPP_MIN_LOG_LEVEL="2")
            rates[name].append(_rate(steps))
        for name, source in ((OURS, "stream"), (MEMORY, "memory")):
            waits[name].append(_wait_share(bench, f"{source}-{turn}", source))
    title = "input pipeline alone, streaming source against sequential reading"
    waiting = "share of a step that waits for input, chief and 1 worker, the hungrier task"
    return [
        Figure("input", title, "examples/s", rates, ratios(rates[OURS], rates[NAIVE]), "times", Goal(5, at_least=True)),
        Figure("input-wait", waiting, "%", waits, goal=Goal(2, at_least=False)),
    ]


def _wait_share(bench: Bench, name: str, source: str) -> float:
    """Return the largest percentage of step time that a task of a training waits for its batches."""
    run = bench.up(name, "--workers=1", steps=bench.steps(STEPS), overrides=[f"--source={source}"], STANDBY="0")
    return 100 * float(max(pace["input_share"] for pace in read_json(run.summary)["pace"]["tasks"].values()))


def _rate(steps: list[dict[str, Any]]) -> float:
    """Return the examples per second after the first batch, which fills buffers."""
    first, last = steps[0], steps[-1]
    return float((last["batch"] - first["batch"]) * GLOBAL_BATCH / (last["time"] - first["time"]))
