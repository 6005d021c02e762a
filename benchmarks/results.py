"""`results.json`: every figure with the conditions of its measurement; and the tables in the documents."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import documents
from benchmarks.figures import Figure
from benchmarks.runs import ROOT
from cluster.host.image import checkout
from cluster.system.errors import RunFailed
from cluster.system.json_files import read_json, write_json

RESULTS = ROOT / "benchmarks" / "results.json"
README, FIGURES = ROOT / "README.md", ROOT / "docs" / "reference" / "figures.md"
SHOWN = ("start", "throughput-together", "throughput-alone", "scaling", "recovery")
"""The figures in the README."""
KEPT = ("README.md", "docs/reference/figures.md", "benchmarks/results.json", "benchmarks/plots")
"""Files that a measurement changes, which do not count as a change of the code."""
BEGIN = documents.begin("invoke bench --write")

COLUMNS = ("figure", "measured", "against", "result", "goal", "reached")

Row = dict[str, Any]
"""A figure as JSON, with its conditions."""


def conditions() -> dict[str, Any]:
    """Return the conditions of a measurement."""
    return {
        "hardware": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(_memory_gib(), 1)},
        "commit": checkout.revision(*KEPT),
        "tensorflow": _tensorflow(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def rows(figures: Sequence[Figure], under: dict[str, Any]) -> list[Row]:
    """Return figures as JSON with their conditions."""
    return [figure.to_json() | under for figure in figures]


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return the old rows, each replaced by the new one of the same name, followed by further new rows."""
    found = {row["name"]: row for row in [*old, *new]}
    return list(found.values())


def read(path: Path = RESULTS) -> list[Row]:
    """Return the earlier figures; none without a file.

    Raises:
        RunFailed: the file cannot be read.
    """
    if not path.exists():
        return []
    try:
        found: list[Row] = read_json(path)["figures"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFailed(f"{path.name} cannot be read ({error}); `git checkout` it or delete it") from None
    return found


def write(found: Sequence[Row], path: Path = RESULTS) -> None:
    """Write the figures."""
    write_json(path, {"figures": list(found)})


def table(found: Sequence[Row], columns: Sequence[str] = COLUMNS) -> list[str]:
    """Return the rows as a Markdown table of these columns, followed by the conditions of the measurements."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    marks: dict[str, str] = {}
    for row in found:
        mark = marks.setdefault(_measured_on(row), "" if not marks else f" ({len(marks) + 1})")
        measured, *others = row["variants"]
        against = "; ".join(f"{other['name']}: {_spread(other, row['unit'])}" for other in others) or "-"
        reached = {True: "yes", False: "no", None: "-"}[row["met"]]
        values = (row["title"] + mark, _spread(measured, row["unit"]), against, _result_spread(row), goal(row), reached)
        cells = dict(zip(COLUMNS, values, strict=True))
        lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
    return [*lines, "", *(f"{number}{on}" for number, on in _notes(marks))]


def tables(found: Sequence[Row]) -> dict[Path, list[str]]:
    """Return the table of each document."""
    shown = [row for row in found if row["name"] in SHOWN]
    return {README: table(shown, COLUMNS[:3]), FIGURES: table(found)}


def renew(found: Sequence[Row]) -> list[str]:
    """Update the tables; return the paths of their documents."""
    renewed = tables(found)
    for path, lines in renewed.items():
        documents.renew([path], BEGIN, lines)
    return [str(path.relative_to(ROOT)) for path in renewed]


def lines(found: Sequence[Row]) -> list[str]:
    """Return the rows as lines of text."""
    shown = []
    for row in found:
        medians = ", ".join(f"{each['name']} {_amount(each['median'], row['unit'])}" for each in row["variants"])
        mark = "no goal" if row["met"] is None else f"goal {goal(row)}: {'reached' if row['met'] else 'missed'}"
        shown.append(f"{row['name']}: {result(row)} ({mark})  {row['title']}: {medians}")
    return shown


def result(row: Row) -> str:
    """Return a row's value in words."""
    return _formatted(row["value"], row["form"], row["unit"])


def goal(row: Row) -> str:
    """Return a row's goal in words."""
    if row["goal"] is None:
        return "-"
    how = "at least" if row["goal"]["at_least"] else "under"
    bound = row["goal"]["bound"]
    return f"{how} {_formatted(bound, row['form'], row['unit'], exact=True)}"


def _formatted(value: float, form: str, unit: str, *, exact: bool = False) -> str:
    if form == "times":
        return f"{value:g} times" if exact else f"{value:.2f} times"
    if form == "cost":
        return f"{value:.0%}" if exact else f"{value:.1%}"
    return f"{value:g} {unit}" if exact else _amount(value, unit)


def _amount(value: float, unit: str) -> str:
    return f"{_number(value)} {unit}"


def _number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f}"


def _spread(variant: dict[str, Any], unit: str) -> str:
    """Return a variant's median, and its smallest and largest samples."""
    samples = variant["samples"]
    if len(samples) == 1:
        return _amount(variant["median"], unit)
    return f"{_amount(variant['median'], unit)} ({_number(min(samples))} to {_number(max(samples))})"


def _result_spread(row: Row) -> str:
    """Return a row's value, and its smallest and largest ratios if the value is their median."""
    if row["form"] == "plain" or len(row["ratios"]) < 2:
        return result(row)
    less = 1 if row["form"] == "cost" else 0
    least, largest = (_formatted(each(row["ratios"]) - less, row["form"], "").split()[0] for each in (min, max))
    return f"{result(row)} ({least} to {largest})"


def _measured_on(row: Row) -> str:
    hardware = row["hardware"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']:g} GiB"
    return f"{machine}; TensorFlow {row['tensorflow']}; commit {_short(row['commit'])}; {row['date']}"


def _short(commit: str) -> str:
    name, dash, dirty = commit.partition("-")
    return f"{name[:12]}{dash}{dirty}" or "-"


def _notes(marks: dict[str, str]) -> list[tuple[str, str]]:
    first = "Medians, with the least and the largest sample. "
    return [(f"({number}) " if number > 1 else first, on) for number, on in enumerate(marks, 1)]


def _cpu() -> str:
    """Return the processor's name and its widest vectors, by which TensorFlow chooses kernels."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    flags = found.get("flags", "").split()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    return f"{found.get('model name', os.uname().machine)}{' with ' * bool(vectors)}{vectors}"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _tensorflow() -> str:
    for package in ("tensorflow-cpu", "tensorflow"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "-"
