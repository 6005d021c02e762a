"""The differences between runs: their inputs, their results, and whether their final weights are the same."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.host.options.run_file import flatten
from cluster.host.reports import listing
from cluster.host.view.columns import columns, plain_lines, sparkline
from cluster.system.terminal import WIDE, terminal_width

MAX_RUNS = 16
_SECRET = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)
_RESULTS = ("result", "steps", "wall_s", "restarts")


def collect_inputs(run: RunFolder) -> dict[str, Any]:
    """Return everything that can make two runs differ, with dotted keys."""
    manifest, cluster = run.load_manifest({}), run.load_cluster()
    topology = {
        "strategy": cluster.strategy,
        "tasks": [task.name for task in cluster.tasks],
        "devices": cluster.devices,
    }
    kept = {name: manifest.get(name) for name in ("runtime", "code", "locks", "own_code", "data", "environment")}
    return without_secrets({"config": run.load_config(), "cluster": topology, **kept})


def without_secrets(records: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of records by dotted keys, without values whose names mark them as secret."""
    return {name: value for name, value in flatten(records) if not _SECRET.search(name)}


def compare_runs(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the differences between runs, the output of `invoke compare --json`."""
    parts = [collect_inputs(run) for run in runs]
    names = dict.fromkeys(name for part in parts for name in part)
    differing = {name: [part.get(name) for part in parts] for name in names}
    differing = {name: values for name, values in differing.items() if any(each != values[0] for each in values)}
    rows = [listing.describe_run(run) for run in runs]
    metrics = [summary.metrics if (summary := run.load_summary()) else {} for run in runs]
    reached = {name: [each.get(name) for each in metrics] for name in dict.fromkeys(itertools.chain(*metrics))}
    return {
        "runs": [run.name for run in runs],
        "differences": differing,
        "results": {name: [row[name] for row in rows] for name in _RESULTS} | reached,
        "weights": [_same_weights(runs[0], other) for other in runs[1:]],
    }


def _same_weights(one: RunFolder, other: RunFolder) -> dict[str, Any]:
    hashes = [getattr(run.load_summary(), "weights_sha256", None) for run in (one, other)]
    return {"runs": [one.name, other.name], "identical": hashes[0] == hashes[1] if all(hashes) else None}


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
        text = [line for row in (*shown, *result) for line in _stacked(value["runs"], *row)]
    return [*text, "", *map(_weights_line, value["weights"])]


def _stacked(runs: Sequence[str], name: str, *cells: str) -> list[str]:
    """Format a value's name, and below it the value of each run, for a terminal that is too narrow for columns."""
    return [name, *columns([("", *pair) for pair in zip(runs, cells, strict=True) if pair[1]])]


def _weights_line(value: dict[str, Any]) -> str:
    verdict = {True: "identical, to the bit", False: "different", None: "not compared: one has no final weights"}
    return f"weights      {' and '.join(value['runs'])}: {verdict[value['identical']]}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 32 else f"{text[:28]}..."
