"""The streaming source's pipeline alone, against sequential reading of the same TFRecord shards."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import DATASET, GLOBAL_BATCH, Bench
from cluster import launch

BATCHES = 900
"""About three epochs: both read every shard again and again, from memory."""
OURS, NAIVE = "streaming source", "sequential reading"


def measure(bench: Bench) -> list[Figure]:
    """Read with each in turn."""
    bench.invoke("data.shard", f"--name={DATASET}")  # nothing to do where they are there
    batches = [f"--batches={bench.steps(BATCHES)}"]
    streaming = ["-m", "benchmarks.streaming", f"--data-dir={launch.data_dir()}", f"--name={DATASET}"]
    naive = ["-m", "benchmarks.baselines.sequential_input", f"--shards={bench.shards}"]
    rates: dict[str, list[float]] = {OURS: [], NAIVE: []}
    for _ in bench.turns():
        for name, command in ((OURS, streaming), (NAIVE, naive)):
            told = bench.rows([sys.executable, *command, *batches], TF_CPP_MIN_LOG_LEVEL="2")
            rates[name].append(_rate(told))
    title = "input pipeline alone, streaming source against sequential reading"
    return [
        Figure("input", title, "examples/s", rates, ratios(rates[OURS], rates[NAIVE]), "times", Goal(5, at_least=True))
    ]


def _rate(told: list[dict[str, Any]]) -> float:
    """Return the examples a second after the first batch, which fills buffers."""
    first, last = told[0], told[-1]
    return float((last["batch"] - first["batch"]) * GLOBAL_BATCH / (last["time"] - first["time"]))
