"""The plots: PNG files, and the same in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Row

SIZE = (7.0, 3.6)
DPI = 120
OURS, OTHERS, IDEAL, APART = "#1f6f8b", "#b8b8b8", "#c8553d", "#7a9e4f"


def draw(found: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Draw what was measured; return each plot's file by its name. What was not measured has none."""
    by_name = {row["name"]: row for row in found}
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, (rows, plot) in PLOTS.items():
        if shown := [by_name[row] for row in rows if row in by_name]:
            drawn[name] = _save(folder / f"{name}.png", plot, shown)
    return drawn


def show(found: Sequence[Row], plots: dict[str, Path], folder: Path) -> None:
    """Show every figure and every plot in TensorBoard."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(0):
        for row in found:
            tf.summary.scalar(f"bench/{row['name']}", row["value"])
            for each in row["variants"]:
                name = f"bench/{row['name']}/{each['name']}"
                for at, sample in enumerate(each["samples"]):
                    tf.summary.scalar(name, sample, step=at)
        for name, path in plots.items():
            tf.summary.image(f"bench/{name}", tf.io.decode_png(path.read_bytes(), channels=3)[tf.newaxis])
    writer.close()


def _save(path: Path, plot: Callable[[Any, Sequence[Row]], None], rows: Sequence[Row]) -> Path:
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(SIZE, DPI, layout="constrained")
    axes = figure.add_subplot()
    plot(axes, rows)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
    return path


def _bars(axes: Any, rows: Sequence[Row], labels: Sequence[str], title: str) -> None:
    """Draw a bar for each variant of each row: its median, and a dot for every sample."""
    places, names = 0, []
    for row, label in zip(rows, labels, strict=True):
        for at, each in enumerate(row["variants"]):
            axes.barh(places, each["median"], color=OTHERS if at else OURS)
            axes.plot(each["samples"], [places] * len(each["samples"]), ".", color="black", markersize=3)
            names.append(f"{label}\n{each['name']}" if label else each["name"])
            places += 1
    axes.set_yticks(range(places), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(rows[0]["unit"])
    axes.set_title(title, fontsize=10)


def _start(axes: Any, rows: Sequence[Row]) -> None:
    growth = [row for row in rows if row["name"] == "tasks"]
    bars = [row for row in rows if row["name"] != "tasks"]
    if not growth:
        labels = ["containers" if row["name"] == "start-containers" else "processes" for row in bars]
        _bars(axes, bars, labels, "To the first finished step, chief and 1 worker")
        return
    counts = [int(each["name"].split()[0]) for each in growth[0]["variants"]]
    seconds = [each["median"] for each in growth[0]["variants"]]
    cores = growth[0]["hardware"]["cores"]
    axes.plot(counts, seconds, "o-", color=OURS, label="up")
    base = max((count for count in counts if count <= cores), default=counts[0])
    ideal = [seconds[counts.index(base)] * count / base for count in counts if count >= base]
    axes.plot([count for count in counts if count >= base], ideal, "--", color=IDEAL, label="linear in tasks per core")
    for row in bars:
        for at, each in enumerate(row["variants"]):
            where = "containers, " if row["name"] == "start-containers" else ""
            mark = "x" if at or where else "s"
            axes.plot([2], [each["median"]], mark, label=where + each["name"], linestyle="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel(f"tasks, on {cores} cores")
    axes.set_ylabel("s to the first finished step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    axes.set_title("Start", fontsize=10)


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    labels = ["chief alone" if "alone" in row["name"] else "chief and 1 worker" for row in rows]
    _bars(axes, rows, labels, "Throughput, 2-conv CNN, batch of 192")


def _scaling(axes: Any, rows: Sequence[Row]) -> None:
    one = rows[0]["variants"][1]
    for row, color in zip(rows, (OURS, OTHERS, APART), strict=False):
        two = row["variants"][0]
        axes.plot([1, 2], [one["median"], two["median"]], "o-", color=color, label=two["name"])
        axes.plot([2] * len(two["samples"]), two["samples"], ".", color="black", markersize=3)
    axes.plot([1, 2], [one["median"], 2 * one["median"]], "--", color=IDEAL, label="twice as fast")
    axes.set_xticks([1, 2])
    axes.set_xlabel("tasks, one core each")
    axes.set_ylabel("examples/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    axes.set_title("Scaling", fontsize=10)


def _recovery(axes: Any, rows: Sequence[Row]) -> None:
    _bars(axes, rows, [""], "From SIGKILL of a task to the next new step")


def _sizes(row: Row) -> tuple[list[int], list[float]]:
    """Return the numbers of tasks of one machine, in order, and the median of each."""
    found = {each["name"].split()[0]: each["median"] for each in row["variants"] if "," not in each["name"]}
    counts = sorted(map(int, found))
    return counts, [found[str(count)] for count in counts]


def _gang(axes: Any, rows: Sequence[Row]) -> None:
    for row, color in zip(rows, (OURS, OTHERS, IDEAL, APART), strict=False):
        counts, medians = _sizes(row)
        label = {"gang-start": "start", "gang-kill": "a kill seen by all", "gang-stop": "stop", "gang-end": "end"}
        axes.plot(counts, medians, "o-", color=color, label=label[row["name"]])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel(f"tasks with a program that does nothing, on {rows[0]['hardware']['cores']} cores")
    axes.set_ylabel("s")
    axes.legend(fontsize=7, frameon=False)
    axes.set_title("Agents of many tasks: time", fontsize=10)


def _gang_cost(axes: Any, rows: Sequence[Row]) -> None:
    for row, color in zip(rows, (OURS, IDEAL), strict=False):
        counts, medians = _sizes(row)
        label = {"gang-share": "% of a core, each agent", "gang-files": "path system calls a second, each agent"}
        per = counts if row["name"] == "gang-files" else [1] * len(counts)
        values = [median / tasks for median, tasks in zip(medians, per, strict=True)]
        axes.plot(counts, values, "o-", color=color, label=label[row["name"]])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel(f"tasks with a program that does nothing, on {rows[0]['hardware']['cores']} cores")
    axes.legend(fontsize=7, frameon=False)
    axes.set_title("Agents of many tasks: cost", fontsize=10)


PLOTS: dict[str, tuple[tuple[str, ...], Callable[[Any, Sequence[Row]], None]]] = {
    "start": (("start", "start-containers", "tasks"), _start),
    "throughput": (("throughput-together", "throughput-alone"), _throughput),
    "scaling": (("scaling", "scaling-same-batch", "scaling-apart"), _scaling),
    "recovery": (("recovery",), _recovery),
    "gang": (("gang-start", "gang-kill", "gang-stop", "gang-end"), _gang),
    "gang-cost": (("gang-share", "gang-files"), _gang_cost),
}
"""The figures that each shows."""
