"""The table of all runs, and the differences between runs: their inputs, results and final weights."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.contract.recovery import restart_costs
from cluster.contract.results import summary
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import final_state, seems_old
from cluster.contract.run.records import Restart
from cluster.host.options.run_file import flatten
from cluster.host.view.columns import cell, chosen_columns, columns, plain_lines, sparkline
from cluster.system.errors import UsageError, nearest
from cluster.system.json_files import DamagedError
from cluster.system.messages import COMMAND, plain, size
from cluster.system.terminal import WIDE, terminal_width

_MEASURED = ("steps", "wall_s", "metric", "score", "strategy", "tasks", "commit", "restarts")
KEYS = ("run", "started", "result", *_MEASURED, "disk_bytes")
"""The keys of a run's row by which runs can be sorted and filtered."""
MAX_RUNS = 16
_SECRET = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)
_RESULTS = ("result", "steps", "wall_s", "restarts")


def duration(wall_s: float | None) -> str:
    """Format a duration as `1 h 02 min`, `3 min 20 s` or `4.1 s`."""
    if wall_s is None:
        return "-"
    minutes, seconds = divmod(round(wall_s), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{wall_s:.1f} s"


COLUMNS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "RUN": ("run", str),
    "RESULT": ("result", str),
    "STEPS": ("steps", cell),
    "DURATION": ("wall_s", duration),
    "SCORE": ("score", lambda score: cell(score, "{:.4f}")),
    "METRIC": ("metric", cell),
    "STRATEGY": ("strategy", cell),
    "TASKS": ("tasks", cell),
    "COMMIT": ("commit", cell),
    "RESTARTS": ("restarts", cell),
    "DISK": ("disk_bytes", size),
    "TAGS": ("tags", lambda tags: cell(" ".join(tags))),
    "NOTE": ("note", cell),
}
"""For each column, the key in a run's row and the function that formats the cell."""
NUMBERS = frozenset({"STEPS", "DURATION", "SCORE", "TASKS", "RESTARTS", "DISK"})
SPARE = ("STRATEGY", "COMMIT", "STEPS", "TASKS", "RESTARTS", "METRIC", "DISK", "NOTE", "TAGS", "DURATION", "SCORE")
"""The columns that are dropped in a narrow terminal, in this order."""


def list_runs(runs_dir: Path) -> list[dict[str, Any]]:
    """Return the row of each run for `invoke runs --json`, newest first."""
    found = [RunFolder(path.parent) for path in runs_dir.glob("*/cluster.json")]
    rows = [describe_run(run) for run in found if not run.incomplete]
    return sorted(rows, key=lambda row: (row["started"] or 0, row["run"]), reverse=True)


def choose_runs(found: list[dict[str, Any]], sort: str, reverse: bool, filters: Sequence[str], limit: int) -> list[Any]:
    """Return the rows that pass all filters, sorted by a key, missing values last; at most `limit`, or all for 0."""
    if sort and sort not in KEYS:
        raise UsageError(f"--sort {sort!r}: expected {', '.join(KEYS)}{nearest(sort, KEYS)}")
    for each in filters:
        key, separator, value = each.partition("=")
        if not separator or key not in (*KEYS, "tag"):
            raise UsageError(f"--filter {each!r}: expected tag=WORD or KEY=VALUE with one of {', '.join(KEYS)}")
        found = [row for row in found if (value in row["tags"] if key == "tag" else value == str(row[key]))]
    known = [row for row in found if not sort or row[sort] is not None]
    others = [row for row in found if row not in known]
    known = sorted(known, key=lambda row: row[sort]) if sort else known
    return [*(known[::-1] if reverse else known), *others][: limit or None]


def describe_run(run: RunFolder) -> dict[str, Any]:
    """Return a run's row; for damaged records, only that they are damaged."""
    started = run.started
    value: dict[str, Any] = {"run": run.name, "started": started.time, "disk_bytes": disk_bytes(run.path)}
    value |= {"tags": list(started.tags), "note": started.note}
    try:
        spec, ended = run.load_cluster(), run.load_summary()
    except (DamagedError, OSError):
        return value | {"result": "damaged"} | dict.fromkeys(_MEASURED)
    metric, reached = (ended and ended.score) or (None, None)
    return value | {
        "result": ended.state if ended else _state(run),
        "steps": ended.steps if ended else run.newest_step,
        "wall_s": ended.wall_s if ended else None,
        "metric": metric,
        "score": reached,
        "strategy": spec.strategy_class,
        "tasks": len(spec.tasks),
        "commit": commit(run),
        "restarts": len(restarts(run)),
    }


def restarts(run: RunFolder) -> Sequence[Restart]:
    """Return the restarts of a run after failures, also of one that is still running."""
    ended = run.load_summary()
    return ended.restarts if ended else restart_costs.costs(run, summary.start_time(run))


def _state(run: RunFolder) -> str:
    """Return the state of a run without a summary, from one reading: `status` checks more reliably."""
    if state := final_state(run):
        return state
    beats = run.heartbeats()
    if all(map(seems_old, beats.values())):
        return "lost" if beats else "not started"
    return beats["chief"].state if "chief" in beats else "starting"


def commit(run: RunFolder) -> str | None:
    """Return the abbreviated commit of a run's code, with `+` if files had changed since."""
    code = run.load_manifest({}).get("code", {})
    known = code.get("commit")
    return plain(known[:8]) + ("+" if code.get("changes_sha256") else "") if known else None


def disk_bytes(folder: Path) -> int:
    """Return the disk space of a folder in bytes. Links are not followed."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(at, name)).st_blocks * 512  # noqa: PTH118  # there are many
    return total


def table_lines(found: list[dict[str, Any]], filters: Sequence[str] = ()) -> list[str]:
    """Format the rows that passed the filters as a table, without columns that do not fit into the terminal."""
    if not found and filters:
        return [f"no run passes --filter {','.join(filters)}; `{COMMAND} runs` lists all"]
    if not found:
        return [f"no runs yet; start one with `{COMMAND} up`"]
    cells = {name: [text(row[key]) for row in found] for name, (key, text) in COLUMNS.items()}
    names = [name for name, column in cells.items() if name not in ("TAGS", "NOTE") or set(column) != {"-"}]
    rows = list(zip(*(cells[name] for name in names), strict=True))
    return chosen_columns(names, rows, right=NUMBERS, spare=SPARE)


def without_secrets(records: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of records by dotted keys, without values whose names mark them as secret."""
    return {name: value for name, value in flatten(records) if not _SECRET.search(name)}


def compare_runs(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the differences between runs, the output of `invoke compare --json`."""
    parts = []  # everything that can make two runs differ
    for run in runs:
        manifest, cluster = run.load_manifest({}), run.load_cluster()
        tasks = [task.name for task in cluster.tasks]
        topology = {"strategy": cluster.strategy, "tasks": tasks, "devices": cluster.devices}
        kept = {name: manifest.get(name) for name in ("runtime", "code", "locks", "own_code", "data", "environment")}
        parts.append(without_secrets({"config": run.load_config(), "cluster": topology, **kept}))
    names = dict.fromkeys(name for part in parts for name in part)
    differing = {name: [part.get(name) for part in parts] for name in names}
    differing = {name: values for name, values in differing.items() if any(each != values[0] for each in values)}
    rows = [describe_run(run) for run in runs]
    metrics = [ended.metrics if (ended := run.load_summary()) else {} for run in runs]
    reached = {name: [each.get(name) for each in metrics] for name in dict.fromkeys(itertools.chain(*metrics))}
    weights = []
    first, *others = [getattr(run.load_summary(), "weights_sha256", None) for run in runs]
    for run, sha256 in zip(runs[1:], others, strict=True):
        weights.append({"runs": [runs[0].name, run.name], "identical": first == sha256 if first and sha256 else None})
    results = {name: [row[name] for row in rows] for name in _RESULTS} | reached
    return {"runs": [run.name for run in runs], "differences": differing, "results": results, "weights": weights}


@plain_lines
def comparison_lines(value: dict[str, Any], runs: Sequence[RunFolder]) -> list[str]:
    """Format a comparison as lines of text: the differences first, then the results."""
    shown = [(name, *map(_cell, values)) for name, values in value["differences"].items()]
    result = [(name, *map(_cell, values)) for name, values in value["results"].items()]
    losses = [[*run.losses().values()] for run in runs]
    result.append(("loss", *(f"{sparkline(each)} {each[-1]:.4f}" if each else "-" for each in losses)))
    head = ("", *value["runs"])
    shown = shown or [("nothing differs", *[""] * len(runs))]
    text = columns([head, *shown, ("",) * len(head), *result], width=WIDE)
    if max(map(len, text)) > terminal_width():
        text = []  # below the name of each value, that of each run
        for name, *cells in (*shown, *result):
            pairs = zip(value["runs"], cells, strict=True)
            text += [name, *columns([("", run, each) for run, each in pairs if each])]
    verdicts = {True: "identical, to the bit", False: "different", None: "not compared: one has no final weights"}
    weights = [f"weights      {' and '.join(pair['runs'])}: {verdicts[pair['identical']]}" for pair in value["weights"]]
    return [*text, "", *weights]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 32 else f"{text[:28]}..."
