"""Examples a second against scripts written by hand: same model, data, batch, strategy and threads."""

from __future__ import annotations

from benchmarks import peers
from benchmarks.figures import Figure, Goal, ratios, step_seconds
from benchmarks.runs import GLOBAL_BATCH, Bench, cores

STEPS = 125
OURS, LOOP, FIT = "ours", "hand-written loop", "Keras fit"
ONEDNN = "hand-written loop with oneDNN"
"""As ours has it, on processors for which TensorFlow leaves it off: what is left then is the loop's own."""
GOAL = Goal(1.25, at_least=True)


def measure(bench: Bench) -> list[Figure]:
    """Run each in turn, chief alone and with a worker."""
    steps, others = bench.steps(STEPS), peers.chosen(bench)
    alone: dict[str, list[float]] = {OURS: [], LOOP: [], FIT: [], ONEDNN: []}
    together: dict[str, list[float]] = {OURS: [], LOOP: [], ONEDNN: [], **{name: [] for name in others}}
    for turn in bench.turns():
        # Ours beside what it is compared with.
        alone[LOOP].append(_rate(bench.baseline("custom_loop", 0, steps, cores())))
        alone[OURS].append(_rate(bench.train(f"alone-{turn}", "--workers=0", steps=steps)))
        alone[ONEDNN].append(_rate(bench.baseline("custom_loop", 0, steps, cores(), TF_ENABLE_ONEDNN_OPTS="1")))
        alone[FIT].append(_rate(bench.baseline("keras_fit", 0, steps, cores())))
        together[ONEDNN].append(_rate(bench.baseline("custom_loop", 1, steps, cores(), TF_ENABLE_ONEDNN_OPTS="1")))
        together[OURS].append(_rate(bench.train(f"together-{turn}", "--workers=1", steps=steps)))
        together[LOOP].append(_rate(bench.baseline("custom_loop", 1, steps, cores())))
        for name, peer in others.items():
            together[name].append(_rate(peer(bench, 2, steps)))
    return [
        _figure("throughput-together", "chief and 1 worker", together, LOOP),
        _figure("throughput-together-onednn", "chief and 1 worker", together, ONEDNN),
        _figure("throughput-alone", "chief alone", alone, LOOP),
        _figure("throughput-alone-onednn", "chief alone", alone, ONEDNN),
        _figure("throughput-alone-fit", "chief alone", alone, FIT),
    ]


def _rate(rows: list[dict[str, float]]) -> float:
    return GLOBAL_BATCH / step_seconds(rows)


def _figure(name: str, who: str, rates: dict[str, list[float]], other: str) -> Figure:
    title = f"examples/s, {who}, against {other if other == FIT else f'the {other}'}"
    shown = {OURS: rates[OURS], other: rates[other]} | (_extra(rates) if other == LOOP else {})
    goal = None if other == ONEDNN else GOAL
    return Figure(name, title, "examples/s", shown, ratios(rates[OURS], rates[other]), "times", goal)


def _extra(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: samples for name, samples in rates.items() if name not in (OURS, LOOP, FIT, ONEDNN)}
