"""The one metric that stands for how good a run's model is."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "eval_"


def of(metrics: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Return a name and a value from a summary's metrics: the first that is not the loss, or else the loss."""
    evaluated = [(name.removeprefix(PREFIX), value) for name, value in metrics.items() if name.startswith(PREFIX)]
    known = [(name, value) for name, value in evaluated if value is not None]
    return min(known, key=lambda each: each[0] == "loss", default=None)
