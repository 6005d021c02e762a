"""The numbers that a run logged, as curves: checked, bounded, and finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.run.folder import RunFolder

Curve = list[tuple[float, float]]

MAX_POINTS = 600
MAX_CURVES = 40
_NO_CURVES = ("step", "epoch", "time")
_BARS = "▁▂▃▄▅▆▇█"


def of(run: RunFolder, task: str = "chief") -> dict[str, Curve]:
    """Return (step, value) for each number that a task logged, by its name; at most `MAX_POINTS` of each."""
    curves: dict[str, Curve] = {}
    for row in run.rows(task):
        for name, value in row.items():
            known = name in curves or (len(curves) < MAX_CURVES and len(name) <= 60)
            if name not in _NO_CURVES and known and _is_number(value):
                curves.setdefault(name, []).append((row["step"], float(value)))
    return {name: thinned(curve) for name, curve in curves.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e30


def thinned(curve: Curve, most: int = MAX_POINTS) -> Curve:
    """Return at most so many points of a curve, evenly spaced, with its last."""
    if len(curve) <= most:
        return curve
    stride = -(-len(curve) // (most - 1))
    return [*curve[:-1:stride], curve[-1]]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return values as a line of blocks, such as `█▆▃▂▁`; empty for fewer than two."""
    shown = [value for _, value in thinned(list(enumerate(values)), width)]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)
