"""`invoke report`: a self-contained page about a run, to read, archive and send.

All content from the run folder is escaped, since tasks can write anything there. The page has no script, and a content
security policy that allows none.
"""

import math
import string
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cluster.contract.results import stragglers
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Record, dictionary
from cluster.host.reports import listing
from cluster.host.view.columns import cell, thinned
from cluster.system.processes import describe_exit

Curve = list[tuple[float, float]]

MAX_ROWS = 200
MAX_POINTS = 600
MAX_CURVES = 40
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 34
TEMPLATE = string.Template(Path(__file__).with_name("report.html").read_text())


def render_page(run: RunFolder) -> str:
    """Return the page about a run, which may still be running; raise DamagedError without valid run records."""
    sections = [
        ("", _head(run, listing.describe_run(run))),
        ("Curves", _curves(run)),
        ("Cluster", _cluster(run)),
        ("Restarts", _restarts(run)),
        ("Where the time went", _time(run)),
        ("Configuration", _table(listing.without_secrets(run.load_config()).items())),
        ("Environment", _environment(run)),
    ]
    body = "".join(f"<section>{f'<h2>{name}</h2>' if name else ''}{part}</section>" for name, part in sections if part)
    return TEMPLATE.substitute(title=escape(run.name), body=body)


def _head(run: RunFolder, row: Mapping[str, Any]) -> str:
    good = {"succeeded": "good", "failed": "bad", "damaged": "bad", "lost": "bad"}.get(str(row["result"]), "")
    score, lasted = cell(row["score"], "{:.4f}"), listing.duration(row["wall_s"])
    shown = {"result": row["result"], row["metric"] or "score": score, "steps": row["steps"], "duration": lasted}
    shown |= {"restarts": row["restarts"], "tasks": row["tasks"]}
    cards = ""
    for name, value in shown.items():
        kind = f" class={good}" if good and name == "result" else ""
        cards += f'<div><span class="soft">{name}</span><b{kind}>{escape(str(value))}</b></div>'
    moment = row["started"]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)) if moment else "at an unknown time"
    words = f"{row['strategy']}, started {began}, commit {row['commit'] or 'unknown'}"
    summary = run.load_summary()
    sha256 = summary and summary.weights_sha256
    sha = f'<p class="soft">weights sha256 {escape(sha256)}</p>' if sha256 else ""
    title = f'<h1>{escape(run.name)}</h1><p class="soft">{escape(words)}</p>'
    why = ""
    if summary and (cause := summary.failure):
        code = "" if cause.exit_code is None else describe_exit(cause.exit_code)
        named = ", ".join(str(each) for each in (cause.task, code, cause.error) if each)
        why = f'<p class="bad">{escape(named)}</p>'
    return f'{title}<div class="cards">{cards}</div>{why}{sha}'


def _curves(run: RunFolder) -> str:
    found = read_curves(run)
    drawn = [
        draw_curves(title, {name: found[name] for name in (title, records.EVALUATED + title) if name in found})
        for title in dict.fromkeys(name.removeprefix(records.EVALUATED) for name in found)
    ]
    return f'<div class="grid">{"".join(f"<div>{each}</div>" for each in drawn)}</div>' if drawn else ""


def _cluster(run: RunFolder) -> str:
    beats, spec, summary = run.heartbeats(), run.load_cluster(), run.load_summary()
    rows = []
    for task in spec.tasks:
        beat = beats.get(task.name)
        pace = (beat and beat.pace) or records.Pace()
        ms = (pace.step_ms or {}).get("p50")
        shown = [cell(ms, "{:.1f}"), cell(pace.busy_share, "{:.0%}"), cell(pace.input_share, "{:.0%}")]
        rows.append([task.name, task.address, beat.state if beat else "-", beat.restarts if beat else 0, *shown])
    head = ["task", "address", "state", "restarts", "ms a step", "busy", "input"]
    slow = "".join(f"<p>{escape(line)}</p>" for line in stragglers.lines(summary.pace if summary else records.Paces()))
    return _rows(head, rows, numbers=range(3, 7)) + slow


def _restarts(run: RunFolder) -> str:
    head = ["generation", "task", "cause", "noticed after", "new step after", "steps lost"]
    rows = []
    for each in listing.restarts(run):
        times = [cell(seconds, "{:.2f} s") for seconds in (each.detected_s, each.resumed_s)]
        rows.append([each.generation, each.task, each.cause, *times, cell(each.steps_lost)])
    return _rows(head, rows, numbers=range(3, 6)) if rows else "<p>No restart.</p>"


def _time(run: RunFolder) -> str:
    summary = run.load_summary()
    split = (summary and summary.goodput_split) or {}
    total = sum(split.values())
    rows = [[name, f"{seconds:.1f} s", f"{seconds / total:.0%}"] for name, seconds in split.items() if seconds > 0]
    return _rows(["part", "time", "share"], rows, numbers=(1, 2)) if rows else ""


def _environment(run: RunFolder) -> str:
    recorded = records.read_record(run.environment, dictionary(Record), {})
    manifest = run.load_manifest({})
    recorded |= {name: manifest[name] for name in ("runtime", "image", "code", "locks") if manifest.get(name)}
    return _table(listing.without_secrets(recorded).items())


def _table(pairs: Iterable[tuple[str, Any]]) -> str:
    shown = [[name, ", ".join(map(str, value)) if isinstance(value, list) else cell(value)] for name, value in pairs]
    more = f'<p class="soft">and {len(shown) - MAX_ROWS} more</p>' if len(shown) > MAX_ROWS else ""
    return _rows([], shown[:MAX_ROWS]) + more if shown else ""


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Collection[int] = ()) -> str:
    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if at in numbers else ''}>{escape(str(value)[:1000])}</{tag}>"
            for at, value in enumerate(row)
        )

    lines = [*([cells("th", head)] if head else []), *(cells("td", row) for row in rows)]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def read_curves(run: RunFolder) -> dict[str, Curve]:
    """Return (step, value) pairs of each metric in the chief's log, finite values only, at most `MAX_POINTS` each."""
    curves: dict[str, Curve] = {}
    for row in run.rows("chief"):
        for name, value in row.items():
            known = name in curves or (len(curves) < MAX_CURVES and len(name) <= 60)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
            if name not in ("step", "epoch", "time") and known and number:
                curves.setdefault(name, []).append((row["step"], float(value)))
    return {name: thinned(curve, MAX_POINTS) for name, curve in curves.items()}


def draw_curves(title: str, curves: Mapping[str, Curve]) -> str:
    """Draw curves over the same axes, with a legend if there are several."""
    points = [point for curve in curves.values() for point in curve]
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
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'{head} aria-label="{escape(title)}">{"".join(parts)}</svg>{legend}'


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from below `low` to above `high`."""
    if high <= low:
        high, low = low + (abs(low) or 1) / 2, low - (abs(low) or 1) / 2
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    return [round(at * stride, 10) for at in range(first, last + 1)]
