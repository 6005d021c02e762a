"""`invoke report`: one page about a run that needs no network, to read, keep and send.

Whatever comes from the run's folder is escaped: tasks can write anything there. The page has no script, and a policy
that allows none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cluster.contract.results import stragglers
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import EVALUATED, Pace, Paces
from cluster.contract.schema import Record, dictionary
from cluster.host.reports import charts, curves, inspection, listing, timeline
from cluster.host.reports.comparison import flat, shareable
from cluster.system.processes import describe_exit

MAX_ROWS = 200
PARTS = {
    "compute": "c2",
    "input": "c4",
    "start": "c0",
    "compile": "c5",
    "evaluate": "c3",
    "save": "c7",
    "restart": "c6",
    "lost": "c1",
    "other": "line",
}
"""The colour of each part of the time."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = (
    charts.STYLE
    + """
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.soft, .soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .2rem .7rem .2rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; } td.number, th.number { text-align: right; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.cards div { background: var(--fill); padding: .6rem .8rem; border-radius: 6px; } .cards b { display: block; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .3rem 0;
  font-size: 12px; } ul.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em; } .wide { overflow-x: auto; } svg { width: 100%; height: auto; }
section > svg { max-width: 40rem; }
table.confusion td { text-align: right; padding: .25rem .45rem; border: 1px solid var(--paper); }
.examples { display: flex; flex-wrap: wrap; gap: .8rem; } figure { margin: 0; width: 6.6rem; font-size: 12px; }
figure img { width: 84px; height: 84px; image-rendering: pixelated; background: #000; border-radius: 4px; }
"""
)


def render(run: RunFolder, *, predictions: bool = True, trust: bool = False) -> str:
    """Return the page.

    Args:
        run: which need not have ended.
        predictions: whether its export is run on the test split, for the confusion matrix.
        trust: whether that is done for a run that may be somebody else's.

    Raises:
        DamagedError: the run's description is damaged.
    """
    row = listing.row(run)
    sections = [
        ("", _head(run, row)),
        ("Curves", _curves(run)),
        ("Cluster", _cluster(run)),
        ("Timeline", timeline.draw(run) + _restarts(run)),
        ("Where the time went", _time(run)),
        ("Predictions", _predictions(run, trust=trust) if predictions else ""),
        ("Configuration", _table(shareable(flat(run.load_config())).items())),
        ("Environment", _environment(run)),
    ]
    body = "".join(f"<section>{f'<h2>{name}</h2>' if name else ''}{part}</section>" for name, part in sections if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _head(run: RunFolder, row: Mapping[str, Any]) -> str:
    good = {"succeeded": "good", "failed": "bad", "damaged": "bad", "lost": "bad"}.get(str(row["result"]), "")
    shown = {
        "result": row["result"],
        row["metric"] or "score": "-" if row["score"] is None else f"{row['score']:.4f}",
        "steps": row["steps"],
        "duration": listing.duration(row["wall_s"]),
        "restarts": row["restarts"],
        "tasks": row["tasks"],
    }
    cards = "".join(
        f'<div><span class="soft">{name}</span><b{f" class={good}" if good and name == "result" else ""}>'
        f"{escape(str(value))}</b></div>"
        for name, value in shown.items()
    )
    moment = row["started"]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)) if moment else "at an unknown time"
    words = f"{row['strategy']}, started {began}, commit {row['commit'] or 'unknown'}"
    weights = getattr(run.load_summary(), "weights_sha256", None)
    sha = f'<p class="soft">weights sha256 {escape(weights)}</p>' if weights else ""
    title = f'<h1>{escape(run.name)}</h1><p class="soft">{escape(words)}</p>'
    return f'{title}<div class="cards">{cards}</div>{_cause(run)}{sha}'


def _cause(run: RunFolder) -> str:
    summary = run.load_summary()
    if not summary or not (cause := summary.failure):
        return ""
    ended = "" if cause.exit_code is None else describe_exit(cause.exit_code)
    words = ", ".join(str(each) for each in (cause.task, ended, cause.error) if each)
    return f'<p class="bad">{escape(words)}</p>'


def _curves(run: RunFolder) -> str:
    found = curves.of(run)
    titles = dict.fromkeys(name.removeprefix(EVALUATED) for name in found)
    drawn = [
        charts.lines(title, {name: found[name] for name in (title, EVALUATED + title) if name in found})
        for title in titles
    ]
    return f'<div class="grid">{"".join(f"<div>{each}</div>" for each in drawn if each)}</div>' if any(drawn) else ""


def _cluster(run: RunFolder) -> str:
    beats, spec, summary = run.heartbeats(), run.load_cluster(), run.load_summary()
    rows = []
    for task in spec.tasks:
        beat = beats.get(task.name)
        pace = (beat and beat.pace) or Pace()
        ms = (pace.step_ms or {}).get("p50")
        numbers = (ms, "{:.1f}"), (pace.busy_share, "{:.0%}"), (pace.input_share, "{:.0%}")
        shown = ["-" if value is None else form.format(value) for value, form in numbers]
        rows.append([task.name, task.address, beat.state if beat else "-", beat.restarts if beat else 0, *shown])
    head = ["task", "address", "state", "restarts", "ms a step", "busy", "input"]
    slow = "".join(f"<p>{escape(line)}</p>" for line in stragglers.lines(summary.pace if summary else Paces()))
    return _rows(head, rows, numbers=range(3, 7)) + slow


def _restarts(run: RunFolder) -> str:
    head = ["generation", "task", "cause", "noticed after", "new step after", "steps lost"]
    rows = []
    summary = run.load_summary()
    for each in summary.restarts if summary else ():
        times = [_seconds(each.detected_s), _seconds(each.resumed_s)]
        rows.append([each.generation, each.task, each.cause, *times, _dash(each.steps_lost)])
    return _rows(head, rows, numbers=range(3, 6)) if rows else "<p>No restart.</p>"


def _time(run: RunFolder) -> str:
    summary = run.load_summary()
    split = summary and summary.goodput_split
    total = sum(split.get(name, 0.0) for name in PARTS) if split else 0
    if not split or total <= 0:
        return ""
    x, bars = 0.0, []
    for name, colour in PARTS.items():
        width = split.get(name, 0.0) / total * charts.WIDTH
        title = f"<title>{name} {split.get(name, 0.0):.1f} s</title>"
        bars.append(f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="26" fill="var(--{colour})">{title}</rect>')
        x += width
    shares = {name: split.get(name, 0.0) / total for name in PARTS}
    named = [
        (f"{name} {split[name]:.1f} s ({shares[name]:.0%})", PARTS[name]) for name in PARTS if shares[name] > 0.001
    ]
    return charts.svg(26, bars, "where the time went") + charts.keys(named)


def _predictions(run: RunFolder, *, trust: bool) -> str:
    if not (run.export / "saved_model.pb").exists():
        return ""
    try:
        found = inspection.classify(run, trust=trust)
    except inspection.Unavailable as error:
        return f'<p class="soft">{escape(str(error))}</p>'
    return _confusion(found["classes"], found["confusion"]) + _examples(found["wrong"])


def _confusion(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    if len(classes) > 40:
        return f'<p class="soft">{len(classes)} classes: too many for a table</p>'
    head = "".join(f'<th class="number">{escape(name[:14])}</th>' for name in classes)
    rows = []
    for name, row in zip(classes, counts, strict=True):
        most = sum(row) or 1
        cells = "".join(f'<td style="background: rgba(var(--heat), {n / most * 0.7:.2f})">{n or ""}</td>' for n in row)
        rows.append(f"<tr><th>{escape(name[:24])}</th>{cells}</tr>")
    body = f"<tr><th>true \\ predicted</th>{head}</tr>{''.join(rows)}"
    return f'<div class="wide"><table class="confusion">{body}</table></div>'


def _examples(wrong: Sequence[Mapping[str, Any]]) -> str:
    shown = "".join(
        f'<figure><img alt="" src="data:image/png;base64,{escape(each["png"])}"><figcaption><span class="bad">'
        f"{escape(each['said'])}</span> {each['share']:.0%}<br>is {escape(each['truth'])}</figcaption></figure>"
        for each in wrong
        if each["png"]
    )
    return f'<h2>Its surest mistakes</h2><div class="examples">{shown}</div>' if shown else ""


def _environment(run: RunFolder) -> str:
    recorded = records.read(run.environment, dictionary(Record), {})
    manifest = listing.manifest(run)
    recorded |= {name: manifest[name] for name in ("runtime", "image", "code", "locks") if manifest.get(name)}
    return _table(shareable(flat(recorded)).items())


def _table(pairs: Iterable[tuple[str, Any]]) -> str:
    shown = [[name, ", ".join(map(str, value)) if isinstance(value, list) else _dash(value)] for name, value in pairs]
    more = f'<p class="soft">and {len(shown) - MAX_ROWS} more</p>' if len(shown) > MAX_ROWS else ""
    return _rows([], shown[:MAX_ROWS]) + more if shown else ""


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if at in right else ''}>{escape(str(value)[:1000])}</{tag}>"
            for at, value in enumerate(row)
        )

    lines = [*([cells("th", head)] if head else []), *(cells("td", row) for row in rows)]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _dash(value: object) -> object:
    return "-" if value is None or value == "" else value
