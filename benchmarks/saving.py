"""What an asynchronous checkpoint costs the training: the 50 steps after each, against the 50 steps that follow."""

from __future__ import annotations

import json
from statistics import median, quantiles

from benchmarks.runs import bench
from cluster.files import read_json_lines

STEPS = 4000
WINDOW = 50


def main() -> None:
    """Measure, and print what came out."""
    with bench() as runs:
        # A chief alone, so that nothing but the writing is beside the training.
        run = runs.up("saving", "--workers=0", f"--checkpoint-every={2 * WINDOW}", steps=STEPS, WARM_SPARE="0")
        times = {row["step"]: row["time"] for row in read_json_lines(run.metrics("chief")) if "loss" in row}
    starts = range(2 * WINDOW, STEPS - 2 * WINDOW, 2 * WINDOW)
    # A window with a checkpoint, from its first byte on, and its neighbour without: noise of the machine is in both.
    pairs = [(times[at + WINDOW] - times[at], times[at + 2 * WINDOW] - times[at + WINDOW]) for at in starts]
    costs = [with_s / without_s - 1 for with_s, without_s in pairs]
    low, _, high = quantiles(costs, n=4)
    told = {"pairs": len(pairs), "median_cost": median(costs), "quartiles": [low, high]}
    print(json.dumps(told | {"median_window_s": median(without_s for _, without_s in pairs)}))
    print(f"a checkpoint every {WINDOW} steps costs {median(costs):.1%} (quartiles {low:.1%} and {high:.1%})")


if __name__ == "__main__":
    main()
