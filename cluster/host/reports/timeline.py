"""A run's generations, checkpoints and faults along the clock, as SVG."""

from __future__ import annotations

from html import escape

from cluster.contract.run.folder import RunFolder
from cluster.host.reports import charts
from cluster.host.reports.charts import LEFT, RIGHT, WIDTH

ROW = 24
MAX_GENERATIONS = 60
MAX_MARKS = 400
MARKS = {"fault": "bad", "checkpoint": "good", "scaled": "c3", "left out": "bad", "taken in": "c3"}
"""The events that are marked, and their colours."""


def draw(run: RunFolder) -> str:
    """Return a bar for each generation, a mark for each fault and checkpoint; empty where nothing was recorded."""
    generations = run.generations()[:MAX_GENERATIONS]
    events = sorted(run.events(), key=lambda event: event.time)
    outcome = run.outcome
    if not generations:
        return ""
    began = generations[0].time if run.started.time is None else run.started.time
    times = [*(each.time for each in generations), *(event.time for event in events)]
    ended = max([*times, outcome.time if outcome else 0.0])
    ticks = charts.ticks(0.0, max(ended - began, 1.0))

    def x_at(moment: float) -> float:
        share: float = (moment - began) / ticks[-1]
        return round(LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT), 1)

    height, parts = ROW * len(generations) + 30, []
    for tick in ticks:
        x = x_at(began + tick)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="{height - 22}"/>')
        anchor = "end" if tick == ticks[-1] else "middle"
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
    return charts.svg(height, parts, "timeline") + charts.keys(notes)
