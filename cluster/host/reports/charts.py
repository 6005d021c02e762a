"""Curves of runs as SVG: no script, no network, and colours that follow light and dark."""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.host.view.columns import thinned

Curve = list[tuple[float, float]]

MAX_POINTS = 600
MAX_CURVES = 40
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 34
STYLE = Path(__file__).with_name("charts.css").read_text()


def read_curves(run: RunFolder) -> dict[str, Curve]:
    """Return (step, value) for each finite number that the chief logged, by its name; at most `MAX_POINTS` of each."""
    curves: dict[str, Curve] = {}
    for row in run.rows("chief"):
        for name, value in row.items():
            known = name in curves or (len(curves) < MAX_CURVES and len(name) <= 60)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
            if name not in ("step", "epoch", "time") and known and number:
                curves.setdefault(name, []).append((row["step"], float(value)))
    return {name: thinned(curve, MAX_POINTS) for name, curve in curves.items()}


def draw_curves(title: str, curves: Mapping[str, Curve]) -> str:
    """Return curves over the same axes; the legend names them where there are several."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = min(xs), max(xs)
    x_ticks, y_ticks = ticks(x_low, x_high), ticks(min(ys), max(ys))

    def x_at(value: float) -> float:
        return round(LEFT + (value - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT), 1)

    def y_at(value: float) -> float:
        share = (value - y_ticks[0]) / ((y_ticks[-1] - y_ticks[0]) or 1)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<text x="{LEFT}" y="16" font-weight="600">{escape(title)}</text>']
    for value in y_ticks:
        y = y_at(value)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in (tick for tick in x_ticks if x_low <= tick <= x_high):
        parts.append(f'<text class="soft" x="{x_at(value)}" y="{HEIGHT - 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text class="soft" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>')
    for at, (name, curve) in enumerate(curves.items()):
        path = " ".join(f"{x_at(x)},{y_at(y)}" for x, y in curve)
        stroke = f'stroke="var(--c{at})"'
        parts.append(f'<polyline class="curve" {stroke} points="{path}"><title>{escape(name)}</title></polyline>')
        if len(curve) == 1:
            ((x, y),) = curve
            parts.append(f'<circle cx="{x_at(x)}" cy="{y_at(y)}" r="4" fill="var(--c{at})"/>')
    names = (f'<li><i style="background: var(--c{at})"></i>{escape(name)}</li>' for at, name in enumerate(curves))
    legend = f'<ul class="legend">{"".join(names)}</ul>' if len(curves) > 1 else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>{legend}'
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from below `low` to above `high`."""
    if high <= low:
        high, low = low + (abs(low) or 1) / 2, low - (abs(low) or 1) / 2
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    return [round(at * stride, 10) for at in range(first, last + 1)]
