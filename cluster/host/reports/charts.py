"""Curves and timelines of runs as SVG: no script, no network, and colours that follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.host.view.columns import thinned

Curve = list[tuple[float, float]]

MAX_POINTS = 600
MAX_CURVES = 40
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 34
COLOURS = 8
"""The ninth curve has the colour of the first, dashed."""
ROW = 24
MAX_GENERATIONS = 60
MAX_MARKS = 400
MARKS = {"fault": "bad", "checkpoint": "good", "scaled": "c3", "left out": "bad", "taken in": "c3"}
"""The events that a timeline marks, and their colours."""
STYLE = Path(__file__).with_name("charts.css").read_text()


def read_curves(run: RunFolder) -> dict[str, Curve]:
    """Return (step, value) for each finite number that the chief logged, by its name; at most `MAX_POINTS` of each."""
    curves: dict[str, Curve] = {}
    for row in run.rows("chief"):
        for name, value in row.items():
            known = name in curves or (len(curves) < MAX_CURVES and len(name) <= 60)
            if name not in ("step", "epoch", "time") and known and _is_number(value):
                curves.setdefault(name, []).append((row["step"], float(value)))
    return {name: thinned(curve, MAX_POINTS) for name, curve in curves.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e30


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
        parts.append(f'<polyline class="curve" {_stroke(at)} points="{path}"><title>{escape(name)}</title></polyline>')
        if len(curve) == 1:
            ((x, y),) = curve
            parts.append(f'<circle cx="{x_at(x)}" cy="{y_at(y)}" r="4" fill="var(--c{at % COLOURS})"/>')
    return svg(HEIGHT, parts, title) + (
        legend((name, f"c{at % COLOURS}") for at, name in enumerate(curves)) if len(curves) > 1 else ""
    )


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
        chart = draw_curves(title, {name: curves.get(name, []) for name in names}).partition("<ul")[0]
        parts.append(chart.replace("<svg ", f'<svg x="0" y="{y}" width="{WIDTH}" height="{HEIGHT}" ', 1))
        y += HEIGHT + 12
    return svg(y, parts, "curves").replace("<svg ", f'<svg width="{WIDTH}" height="{y}" ', 1)


def svg(height: float, parts: Sequence[str], title: str) -> str:
    """Return a drawing `WIDTH` wide."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def legend(named: Iterable[tuple[str, str]]) -> str:
    """Return a list of names, each with its colour of `STYLE`."""
    items = (f'<li><i style="background: var(--{colour})"></i>{escape(name)}</li>' for name, colour in named)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stroke(at: int) -> str:
    dashed = ' stroke-dasharray="5 3"' if at >= COLOURS else ""
    return f'stroke="var(--c{at % COLOURS})"{dashed}'


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from below `low` to above `high`."""
    if high <= low:
        high, low = low + (abs(low) or 1) / 2, low - (abs(low) or 1) / 2
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    return [round(at * stride, 10) for at in range(first, last + 1)]


def draw_timeline(run: RunFolder) -> str:
    """Return a bar for each generation, a mark for each fault and checkpoint; empty where nothing was recorded."""
    generations = run.generations()[:MAX_GENERATIONS]
    events = sorted(run.events(), key=lambda event: event.time)
    outcome = run.outcome
    if not generations:
        return ""
    began = generations[0].time if run.started.time is None else run.started.time
    times = [*(each.time for each in generations), *(event.time for event in events)]
    ended = max([*times, outcome.time if outcome else 0.0])
    marks_at = ticks(0.0, max(ended - began, 1.0))

    def x_at(moment: float) -> float:
        share: float = (moment - began) / marks_at[-1]
        return round(LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT), 1)

    height, parts = ROW * len(generations) + 30, []
    for tick in marks_at:
        x = x_at(began + tick)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="{height - 22}"/>')
        anchor = "end" if tick == marks_at[-1] else "middle"
        parts.append(f'<text class="soft" x="{x}" y="{height - 6}" text-anchor="{anchor}">{tick:g} s</text>')
    firsts = {event.generation: event.time for event in reversed(events) if event.event == "first step"}
    rows = {}
    for at, generation in enumerate(generations):
        y = rows[generation.generation] = at * ROW + 4
        until = generations[at + 1].time if at + 1 < len(generations) else ended
        first = firsts.get(generation.generation, until)
        why = generation.cause or "the start"
        title = escape(f"generation {generation.generation}: {why}")
        parts.append(f'<text class="soft" x="4" y="{y + 13}">gen {generation.generation}</text>')
        for start, end, opacity in ((generation.time, first, 0.35), (first, until, 1)):
            width = max(0.0, round(x_at(end) - x_at(start), 1))
            parts.append(
                f'<rect x="{x_at(start)}" y="{y}" width="{width}" height="16" fill="var(--c0)" opacity="{opacity}">'
                f"<title>{title}</title></rect>"
            )
    marked = [event for event in events if event.event in MARKS and event.generation in rows][:MAX_MARKS]
    for event in marked:
        x, y = x_at(event.time), rows[event.generation]
        words = [event.event, event.detail.get("kind", ""), event.task, f"step {event.step}"]
        parts.append(
            f'<path d="M{x - 4} {y + 18}L{x + 4} {y + 18}L{x} {y + 9}Z" fill="var(--{MARKS[event.event]})">'
            f"<title>{escape(' '.join(word for word in words if word))}</title></path>"
        )
    notes = ("generation, pale until its first step", "c0"), ("fault", "bad"), ("checkpoint", "good")
    return svg(height, parts, "timeline") + legend(notes)
