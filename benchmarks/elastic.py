"""The cost of virtual shards (`--bitwise-elastic`) per step."""

from __future__ import annotations

from benchmarks.determinism import Options, compared
from benchmarks.figures import Figure, Goal
from benchmarks.runs import Bench

STEPS = 400
PAIRS = (("alone", 0, 6), ("together", 1, 2), ("together", 1, 6))
"""Name, number of workers and number of shards of each pair."""


def measure(bench: Bench) -> list[Figure]:
    """Train alternately with and without virtual shards."""
    pairs: dict[str, tuple[str, Options, Options, Goal | None]] = {}
    for who, workers, shards in PAIRS:
        whom = "chief and one worker" if workers else "chief alone"
        plain = (f"--workers={workers}",)
        title = f"cost of `--bitwise-elastic {shards}`, {whom}"
        pairs[f"elastic-{shards}-{who}"] = (title, plain, (*plain, f"--bitwise-elastic={shards}"), None)
    return compared(bench, STEPS, pairs)
