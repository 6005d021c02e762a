"""Results of campaigns: a line for each run in a record file, and their counts in docs/internals/recovery.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks import documents
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.volleys import PHASES, WEIGHTS
from cluster.system.files import ROOT
from cluster.system.json_files import append_json, read_json_lines

RECORD = ROOT / "docs" / "internals" / "storms.jsonl"
PAGE = ROOT / "docs" / "internals" / "recovery.md"
BEGIN = documents.begin("python -m benchmarks.campaign --write")

Row = dict[str, Any]
SAME, CHANGED, NOT_COMPARED = "same", "changed", "not compared"


def row(
    case: str, seed: str, commit: str, faults: Sequence[dict[str, Any]], *, lost: str, bits: str, seconds: float
) -> Row:
    """Return the row of a run: `lost` says why it did not succeed, `bits` how it compares with an undisturbed one."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "case": case,
        "seed": seed,
        "kinds": dict(Counter(fault["kind"] for fault in faults)),
        "phases": dict(Counter(fault["phase"] for fault in faults)),
        "lost": lost,
        "bits": bits,
        "seconds": round(seconds, 1),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Return the counts of all runs as Markdown: by kind of run, then faults by kind and by phase."""
    lines = ["| runs of | runs | faults | lost | compared | bits changed |", "|---|---:|---:|---:|---:|---:|"]
    groups = [(f"`{name}`", [row for row in rows if row["case"] == name]) for name in CASES]
    bad = max((at for at, row in enumerate(rows, 1) if row["lost"] or row["bits"] == CHANGED), default=0)
    since = [("since the last run that was lost or changed", list(rows[bad:]))] if bad else []
    for title, group in [*groups, ("all", list(rows)), *since]:
        compared = [row for row in group if row["bits"] != NOT_COMPARED]
        counts = [
            len(group),
            sum(sum(row["kinds"].values()) for row in group),
            sum(bool(row["lost"]) for row in group),
            len(compared),
            sum(row["bits"] == CHANGED for row in compared),
        ]
        lines.append(f"| {title} | {' | '.join(map(str, counts))} |")
    for title, names in (("kind", WEIGHTS), ("phase", PHASES)):
        total: Counter[str] = Counter()
        for row in rows:
            total.update(row[f"{title}s"])
        lines += ["", f"| {title} | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
        lines.append(f"| faults | {' | '.join(str(total[name]) for name in names)} |")
    dates = sorted({row["date"] for row in rows})
    return [*lines, "", f"From {dates[0]} to {dates[-1]}." if dates else "No run yet."]


def read() -> list[Row]:
    """Return the rows of all recorded runs."""
    return list(read_json_lines(RECORD))


def add(row: Row) -> None:
    """Record a run."""
    append_json(RECORD, row)
