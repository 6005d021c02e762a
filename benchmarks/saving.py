"""The cost of an asynchronous checkpoint to the training: the 50 steps after it, against the next 50 steps."""

from __future__ import annotations

from benchmarks.figures import Figure, ratios
from benchmarks.runs import Bench
from benchmarks.telemetry import between

STEPS = 4000
WINDOW = 50


def measure(bench: Bench) -> list[Figure]:
    """Train a chief alone, once: each checkpoint is a round."""
    steps = 6 * WINDOW if bench.quick else STEPS
    # A chief alone, so that nothing but the writing competes with the training.
    rows = bench.train("saving", "--workers=0", f"--checkpoint-every={2 * WINDOW}", steps=steps)
    starts = range(2 * WINDOW, steps - 2 * WINDOW + 1, 2 * WINDOW)
    # A window with a checkpoint, from its first byte on, and its neighbour without: noise of the machine is in both.
    with_s = [between(rows, at, at + WINDOW) for at in starts]
    without_s = [between(rows, at + WINDOW, at + 2 * WINDOW) for at in starts]
    title, unit = f"cost of a checkpoint every {WINDOW} steps, chief alone", f"s for {WINDOW} steps"
    variants = {"with": with_s, "without": without_s}
    return [Figure("saving", title, unit, variants, ratios(with_s, without_s), "cost")]
