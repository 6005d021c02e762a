"""Plots of the figures, as PNG files and in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Row

WIDTH, BAR_HEIGHT = 7.0, 0.42
DPI = 120
OURS, OTHERS = "#1f6f8b", "#b8b8b8"

PLOTS = {
    "start": ("start", "start-containers"),
    "tasks": ("tasks",),
    "throughput": ("throughput-together", "throughput-alone"),
    "scaling": ("scaling", "scaling-same-batch", "scaling-apart"),
    "recovery": ("recovery", "recovery-containers"),
    "goodput": ("goodput-5", "goodput-15", "goodput-60"),
}
"""The figures that each plot shows."""


def draw(found: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Draw the measured figures; return the file of each plot by name. Plots without measured figures are left out."""
    by_name = {row["name"]: row for row in found}
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, rows in PLOTS.items():
        if shown := [by_name[row] for row in rows if row in by_name]:
            drawn[name] = _save(folder / f"{name}.png", name, shown)
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


def _save(path: Path, title: str, rows: Sequence[Row]) -> Path:
    """Draw a bar for each variant of each row: its median, and a dot for every sample."""
    from matplotlib.figure import Figure  # pyplot would look for a display

    bars = [(row["name"], at, variant) for row in rows for at, variant in enumerate(row["variants"])]
    figure = Figure((WIDTH, 1 + BAR_HEIGHT * len(bars)), DPI, layout="constrained")
    axes = figure.add_subplot()
    for place, (_, at, variant) in enumerate(bars):
        axes.barh(place, variant["median"], color=OTHERS if at else OURS)
        axes.plot(variant["samples"], [place] * len(variant["samples"]), ".", color="black", markersize=3)
    axes.set_yticks(range(len(bars)), [f"{name}\n{variant['name']}" for name, _, variant in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(rows[0]["unit"])
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
    return path
