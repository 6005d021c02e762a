"""What the same bits cost: deterministic operations and virtual shards (`--bitwise-elastic`), against plain runs.

The variants take turns, so that noise of the machine is in both of a pair.
"""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import median

from benchmarks.runs import Bench, bench
from cluster.files import read_json_lines
from cluster.runs import RunFolder

STEPS = 400
ROUNDS = 5
PAIRS = {
    "deterministic operations, chief alone": (("--workers=0", "--no-deterministic"), ("--workers=0",)),
    "--bitwise-elastic 6, chief alone": (("--workers=0",), ("--workers=0", "--bitwise-elastic=6")),
    "--bitwise-elastic 2, chief and one worker": (("--workers=1",), ("--workers=1", "--bitwise-elastic=2")),
    "--bitwise-elastic 6, chief and one worker": (("--workers=1",), ("--workers=1", "--bitwise-elastic=6")),
}
"""What is measured: the options without it, and with it."""


def main() -> None:
    """Measure, and print what came out."""
    seconds: dict[str, list[tuple[float, float]]] = {what: [] for what in PAIRS}
    with bench() as runs:
        for turn in range(ROUNDS):
            done: dict[tuple[str, ...], float] = {}  # what two pairs share runs once a turn
            for what, (plain, other) in PAIRS.items():
                for options in (plain, other):
                    if options not in done:
                        done[options] = step_seconds(runs, f"turn-{turn}-{len(done)}", options)
                seconds[what].append((done[plain], done[other]))
    costs = {what: [other / plain - 1 for plain, other in pairs] for what, pairs in seconds.items()}
    print(json.dumps({"steps": STEPS, "seconds_a_step": seconds}))
    for what, of in costs.items():
        print(f"{what}: a step takes {1 + median(of):.2f} times as long ({min(of) + 1:.2f} to {max(of) + 1:.2f})")


def step_seconds(runs: Bench, name: str, options: tuple[str, ...]) -> float:
    """Return the median time of a step in a training with these options, in seconds."""
    overrides = [option for option in options if option == "--no-deterministic"]
    words = [option for option in options if option not in overrides]
    run = runs.up(name, *words, steps=STEPS, overrides=overrides, WARM_SPARE="0")
    return _step_seconds(run)


def _step_seconds(run: RunFolder) -> float:
    rows = [row for row in read_json_lines(run.metrics("chief")) if "loss" in row]
    spans = [(after["time"] - row["time"]) / (after["step"] - row["step"]) for row, after in pairwise(rows)]
    return median(spans[1:])  # the first holds the first step, which compiles


if __name__ == "__main__":
    main()
