"""Figures as benchmarks find them, made up."""

from typing import Any

from benchmarks import results
from benchmarks.figures import Figure, Goal

UNDER = {
    "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.5},
    "commit": "0123456789abcdef0123",
    "tensorflow": "2.21.0",
    "date": "2030-01-02",
}
TOGETHER = Figure(
    "throughput-together",
    "examples/s, chief and 1 worker, against the hand-written loop",
    "examples/s",
    {"ours": [3000.0, 2000.0, 4000.0], "hand-written loop": [2000.0, 1600.0, 2000.0]},
    [1.5, 1.25, 2.0],
    "times",
    Goal(1.25, at_least=True),
)
START = Figure(
    "start", "`up` to the first step", "s", {"up": [5.0, 9.0, 5.5], "by hand": [6.0, 6.5, 7.0]}, (), "plain",
    Goal(6.0, at_least=False),
)  # fmt: skip
COST = Figure(
    "telemetry", "cost of it all", "s for 400 steps", {"with": [10.3], "without": [10.0]}, [1.03], "cost",
    Goal(0.02, at_least=False),
)  # fmt: skip
SCALING = Figure(
    "scaling", "one core each", "examples/s", {"chief and 1 worker": [1900.0], "chief": [1000.0]}, [0.95], "times"
)
RECOVERY = Figure("recovery", "after a kill", "s", {"with standby": [2.4, 2.5], "without": [7.0, 7.4]}, [0.34])


def rows(*found: Figure, **changed: Any) -> list[results.Row]:
    return results.rows(found or (TOGETHER, START, COST), UNDER | changed)
