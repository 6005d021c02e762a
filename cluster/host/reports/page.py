"""`invoke report`: one page about a run that needs no network, to read, keep and send.

Whatever comes from the run's folder is escaped: tasks can write anything there. The page has no script, and a policy
that allows none.
"""

import string
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cluster.contract.results import stragglers
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Pace
from cluster.contract.run.summary_records import EVALUATED, Paces
from cluster.contract.schema import Record, dictionary
from cluster.host.reports import charts, listing
from cluster.host.reports.comparison import without_secrets
from cluster.host.reports.listing import or_dash
from cluster.system.processes import describe_exit

MAX_ROWS = 200
TEMPLATE = string.Template(Path(__file__).with_name("report.html").read_text())


def render_page(run: RunFolder) -> str:
    """Return the page about a run, which need not have ended; raise DamagedError without its description."""
    row = listing.describe_run(run)
    sections = [
        ("", _head(run, row)),
        ("Curves", _curves(run)),
        ("Cluster", _cluster(run)),
        ("Restarts", _restarts(run)),
        ("Where the time went", _time(run)),
        ("Configuration", _table(without_secrets(run.load_config()).items())),
        ("Environment", _environment(run)),
    ]
    body = "".join(f"<section>{f'<h2>{name}</h2>' if name else ''}{part}</section>" for name, part in sections if part)
    return TEMPLATE.substitute(title=escape(run.name), style=charts.STYLE, body=body)


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
    found = charts.read_curves(run)
    titles = dict.fromkeys(name.removeprefix(EVALUATED) for name in found)
    drawn = [
        charts.draw_curves(title, {name: found[name] for name in (title, EVALUATED + title) if name in found})
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
        times = ["-" if value is None else f"{value:.2f} s" for value in (each.detected_s, each.resumed_s)]
        rows.append([each.generation, each.task, each.cause, *times, or_dash(each.steps_lost)])
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
    return _table(without_secrets(recorded).items())


def _table(pairs: Iterable[tuple[str, Any]]) -> str:
    shown = [[name, ", ".join(map(str, value)) if isinstance(value, list) else or_dash(value)] for name, value in pairs]
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
