"""Charts as SVG, which a page holds as they are: no script, no network, and colours that follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from cluster.host.reports.curves import Curve

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 34
COLOURS = 8
"""How many colours there are; the ninth curve has that of the first, dashed."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2127; --soft: #5b6570; --line: #d8dde3; --fill: #f3f5f7;
  --c0: #1f6fd0; --c1: #c2410c; --c2: #15803d; --c3: #a21caf; --c4: #ca8a04; --c5: #0e7490; --c6: #be123c;
  --c7: #4d5b6a; --good: #15803d; --bad: #b91c1c; --heat: 31, 111, 208; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e6e9ed; --soft: #9aa5b1; --line: #323a43;
  --fill: #1d232a; --c0: #6cb0ff; --c1: #ff9d66; --c2: #6fd08c; --c3: #e08bf0; --c4: #f2c14e; --c5: #5ecbe0;
  --c6: #ff8aa3; --c7: #b4bfca; --good: #6fd08c; --bad: #ff8a80; --heat: 108, 176, 255; } }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .curve { fill: none; stroke-width: 1.8; }
"""


def lines(title: str, curves: Mapping[str, Curve], unit: str = "step") -> str:
    """Return curves over the same axes; the legend names them where there are several."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    x_ticks, y_ticks = ticks(*_span(x for x, _ in points)), ticks(*_span(y for _, y in points))
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)

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
    parts.append(f'<text class="soft" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(unit)}</text>')
    for at, (name, curve) in enumerate(curves.items()):
        path = " ".join(f"{x_at(x)},{y_at(y)}" for x, y in curve)
        parts.append(f'<polyline class="curve" {_stroke(at)} points="{path}"><title>{escape(name)}</title></polyline>')
        if len(curve) == 1:
            ((x, y),) = curve
            parts.append(f'<circle cx="{x_at(x)}" cy="{y_at(y)}" r="4" fill="var(--c{at % COLOURS})"/>')
    return svg(HEIGHT, parts, title) + (legend(list(curves)) if len(curves) > 1 else "")


def picture(charts: Sequence[tuple[str, Mapping[str, Curve]]]) -> str:
    """Return several charts below each other as one SVG file with a legend."""
    names = list(dict.fromkeys(name for _, curves in charts for name in curves))
    row, top = 20, 8
    parts = [f"<style>{STYLE}</style>", '<rect width="100%" height="100%" fill="var(--paper)"/>']
    for at, name in enumerate(names):
        y = top + row * at + 12
        parts.append(f'<line class="curve" {_stroke(at)} x1="{LEFT}" x2="{LEFT + 24}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text x="{LEFT + 32}" y="{y}">{escape(name)}</text>')
    y = top + row * len(names) + 8
    for title, curves in charts:
        chart = lines(title, {name: curves.get(name, []) for name in names}).partition("<ul")[0]
        parts.append(chart.replace("<svg ", f'<svg x="0" y="{y}" width="{WIDTH}" height="{HEIGHT}" ', 1))
        y += HEIGHT + 12
    return svg(y, parts, "curves").replace("<svg ", f'<svg width="{WIDTH}" height="{y}" ', 1)


def svg(height: float, parts: Sequence[str], title: str) -> str:
    """Return a drawing `WIDTH` wide."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def legend(names: Sequence[str]) -> str:
    """Return which colour is which, as a list."""
    return keys((name, f"c{at % COLOURS}") for at, name in enumerate(names))


def keys(named: Iterable[tuple[str, str]]) -> str:
    """Return what colours mean, each of `STYLE`, as a list."""
    items = (f'<li><i style="background: var(--{colour})"></i>{escape(name)}</li>' for name, colour in named)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stroke(at: int) -> str:
    dashed = ' stroke-dasharray="5 3"' if at >= COLOURS else ""
    return f'stroke="var(--c{at % COLOURS})"{dashed}'


def _span(values: Iterable[float]) -> tuple[float, float]:
    listed = list(values)
    return min(listed), max(listed)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from below `low` to above `high`."""
    if high <= low:
        high, low = low + (abs(low) or 1) / 2, low - (abs(low) or 1) / 2
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    return [round(at * stride, 10) for at in range(first, last + 1)]
