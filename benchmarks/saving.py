"""What asynchronous checkpoints cost the training: the time of the same steps with many of them, against none."""

from __future__ import annotations

import json
from statistics import median

from benchmarks.runs import Bench, bench
from cluster.runs import read_json_lines

ROUNDS = 4
STEPS = 800
EVERY = 50


def seconds(runs: Bench, name: str, every: int) -> float:
    """Return how long a chief alone takes from step 25 to the last but 25, without start, evaluation and export."""
    run = runs.up(name, "--workers=0", f"--checkpoint-every={every}", steps=STEPS, WARM_SPARE="0")
    times = {row["step"]: row["time"] for row in read_json_lines(run.metrics("chief")) if "loss" in row}
    return times[STEPS - 25] - times[25]


def main() -> None:
    """Measure both in turn, and print what came out."""
    without, with_some = [], []
    with bench() as runs:
        for number in range(ROUNDS):
            without.append(seconds(runs, f"none-{number}", 10**9))
            with_some.append(seconds(runs, f"some-{number}", EVERY))
    print(json.dumps({"without_s": without, "with_s": with_some}))
    share = median(with_some) / median(without) - 1
    print(f"a checkpoint every {EVERY} steps costs {share:.1%} of the time of {STEPS - 50} steps")


if __name__ == "__main__":
    main()
