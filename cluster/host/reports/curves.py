"""The numbers that a run logged, as curves: checked, bounded, and finite."""

from __future__ import annotations

import math

from cluster.contract.run.folder import RunFolder
from cluster.host.view.sparkline import thinned

Curve = list[tuple[float, float]]

MAX_POINTS = 600
MAX_CURVES = 40
_NO_CURVES = ("step", "epoch", "time")


def of(run: RunFolder, task: str = "chief") -> dict[str, Curve]:
    """Return (step, value) for each number that a task logged, by its name; at most `MAX_POINTS` of each."""
    curves: dict[str, Curve] = {}
    for row in run.rows(task):
        for name, value in row.items():
            known = name in curves or (len(curves) < MAX_CURVES and len(name) <= 60)
            if name not in _NO_CURVES and known and _is_number(value):
                curves.setdefault(name, []).append((row["step"], float(value)))
    return {name: thinned(curve, MAX_POINTS) for name, curve in curves.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e30
