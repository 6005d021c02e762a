"""Examples per second against others at their best: the same model, data, batch and optimizer."""

from __future__ import annotations

from statistics import median

from benchmarks import peers
from benchmarks.contenders import FIT, LOOP, Contender, fastest, rate
from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import Bench

STEPS = 300
TIMES = 3
"""Factor of the number of rounds: these runs are short, and a machine's speed may change by a third between two."""
OURS = "ours"
GOAL = Goal(1.25, at_least=True)


def measure(bench: Bench) -> list[Figure]:
    """Compare a chief with a worker, and a chief alone, with the other programs."""
    others = peers.chosen(bench)
    return [
        _compared(bench, "throughput-together", "chief and 1 worker", 2, [LOOP, *others]),
        _compared(bench, "throughput-alone", "chief alone", 1, [LOOP, FIT, *(each for each in others if each.alone)]),
    ]


def _compared(bench: Bench, name: str, who: str, tasks: int, others: list[Contender]) -> Figure:
    """Find the best setting of each program, then run them in turn; ours is compared with the fastest of the others."""
    bench.log(f"  {who}: settings")
    steps = bench.steps(STEPS)
    tried: dict[str, list[float]] = {}
    chosen = []
    for other in others:
        setting, trials = fastest(bench, other, tasks)
        chosen.append((f"{other.title}: {setting.name}", other, setting))
        tried |= {f"{other.title}: {setting_name}": rates for setting_name, rates in trials.items()}
    rates: dict[str, list[float]] = {OURS: [], **{title: [] for title, *_ in chosen}}
    for turn in bench.turns(TIMES):
        rates[OURS].append(rate(bench.train(f"{name}-{turn}", f"--workers={tasks - 1}", steps=steps)))
        for title, other, setting in chosen:
            rates[title].append(other.rate(bench, tasks, steps, setting))
    order = sorted((title for title, *_ in chosen), key=lambda title: -median(rates[title]))
    title = f"examples/s, {who}, against the fastest of others, each at its best setting"
    variants = {each: rates[each] for each in (OURS, *order)}
    return Figure(name, title, "examples/s", variants, ratios(rates[OURS], rates[order[0]]), "times", GOAL, tried)
