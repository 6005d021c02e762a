"""The cost of an asynchronous checkpoint to the training, and of its upload to a mirror."""

from __future__ import annotations

from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import Bench
from benchmarks.telemetry import between

STEPS, MIRRORED_STEPS = 4000, 600
WINDOW = 50
EVERY = 2 * WINDOW
# A chief alone, so that nothing but the writing competes with the training.
TRAINING = ("--workers=0", f"--checkpoint-every={EVERY}")


def measure(bench: Bench) -> list[Figure]:
    """Measure both costs."""
    return [_checkpoint(bench), _mirror(bench)]


def _checkpoint(bench: Bench) -> Figure:
    """Compare the 50 steps after each checkpoint with the next 50; each checkpoint is a round."""
    steps = 6 * WINDOW if bench.quick else STEPS
    rows = bench.train("saving", *TRAINING, steps=steps)
    starts = range(EVERY, steps - EVERY + 1, EVERY)
    # A window with a checkpoint, from its first byte on, and its neighbour without: noise of the machine is in both.
    with_s = [between(rows, at, at + WINDOW) for at in starts]
    without_s = [between(rows, at + WINDOW, at + EVERY) for at in starts]
    title, unit = f"cost of a checkpoint every {WINDOW} steps, chief alone", f"s for {WINDOW} steps"
    variants = {"with": with_s, "without": without_s}
    return Figure("saving", title, unit, variants, ratios(with_s, without_s), "cost")


def _mirror(bench: Bench) -> Figure:
    """Train alternately with and without a mirror in a folder."""
    last = 3 * EVERY if bench.quick else MIRRORED_STEPS
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for turn in bench.turns():
        # The second run of a round is the first one of the next: a drift of the machine's speed is in both.
        for variant in ("with", "without") if turn % 2 else ("without", "with"):
            mirror = [f"--mirror=file://{bench.folder}/mirror"] if variant == "with" else []
            rows = bench.train(f"mirror-{variant}-{turn}", *TRAINING, *mirror, steps=last)
            seconds[variant].append(between(rows, EVERY, last))
    cost = ratios(seconds["with"], seconds["without"])
    title, unit = f"cost of --mirror, a checkpoint every {EVERY} steps, chief alone", f"s for {last - EVERY} steps"
    return Figure("mirroring", title, unit, seconds, cost, "cost", Goal(0.02, at_least=False))
