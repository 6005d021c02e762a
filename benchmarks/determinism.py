"""The cost of deterministic operations per step, against `--no-deterministic`."""

from __future__ import annotations

from benchmarks.figures import Figure, Goal, ratios, step_seconds
from benchmarks.runs import Bench

STEPS = 150
Options = tuple[str, ...]


def measure(bench: Bench) -> list[Figure]:
    """Train alternately with and without deterministic operations."""
    plain, other = ("--workers=0", "--no-deterministic"), ("--workers=0",)
    title = "cost of deterministic operations, chief alone"
    return compared(bench, STEPS, {"determinism": (title, plain, other, Goal(0.10, at_least=False))})


def compared(bench: Bench, steps: int, pairs: dict[str, tuple[str, Options, Options, Goal | None]]) -> list[Figure]:
    """Train alternately with both options of each pair: (title, options without, options with, goal).

    Options that pairs share run once per round.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for turn in bench.turns():
        done: dict[Options, float] = {}
        for name, (_, plain, other, _) in pairs.items():
            for options in (plain, other):
                if options not in done:
                    done[options] = _step_seconds(bench, f"turn-{turn}-{len(done)}", options, bench.steps(steps))
            seconds[name].append((done[plain], done[other]))
    found = []
    for name, (title, plain, other, goal) in pairs.items():
        without, with_it = (list(samples) for samples in zip(*seconds[name], strict=True))
        variants = {" ".join(other): with_it, " ".join(plain): without}
        found.append(Figure(name, title, "s a step", variants, ratios(with_it, without), "cost", goal))
    return found


def _step_seconds(bench: Bench, name: str, options: Options, steps: int) -> float:
    overrides = [option for option in options if option == "--no-deterministic"]
    words = [option for option in options if option not in overrides]
    return step_seconds(bench.train(name, *words, steps=steps, overrides=overrides))
