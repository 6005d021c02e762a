"""Step times of one generation of a task, in bounded memory. Shapes: S steps; columns: whole step, input, busy."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.contract.run.records import Pace

RECENT = 200
"""Number of newest steps in the heartbeat."""
KEPT = 4096
"""Number of newest steps that are kept."""


@dataclass(frozen=True)
class Times:
    """Times of optimizer steps of one task, or of a sample of them, in seconds; None for unknown parts."""

    steps: np.ndarray
    """`[S] float64`: whole steps, including waiting for other tasks."""
    inputs: np.ndarray | None = None
    """`[S] float64`: waiting for the batch."""
    busy: np.ndarray | None = None
    """`[S] float64`: until the batch had arrived and the task's gradients were computed."""

    @property
    def input_share(self) -> float:
        """Share of the time spent waiting for batches; 0 if unknown."""
        return 0.0 if self.inputs is None or not self.steps.any() else float(self.inputs.sum() / self.steps.sum())


class StepTiming:
    """Collects the step times of one generation."""

    def __init__(self) -> None:
        self._kept_S3 = np.zeros((0, 3))
        self.steps = 0
        """Number of measured steps."""

    def add(self, times: Times) -> None:
        unknown_S = np.full(len(times.steps), np.nan)
        parts = (times.steps, *(unknown_S if part is None else part for part in (times.inputs, times.busy)))
        rows_S3 = np.stack(parts, 1)
        self.steps += len(rows_S3)
        self._kept_S3 = np.concatenate([self._kept_S3, rows_S3])[-KEPT:]

    def recent(self) -> dict[str, Any]:
        """Return the statistics of the newest steps for the heartbeat; empty without steps."""
        return _describe(self._kept_S3[-RECENT:], {"median": 50, "p90": 90}) if self.steps else {}

    def generation(self) -> Pace:
        """Return the pace of this generation, by its newest steps."""
        percentiles = {f"p{number}": number for number in (10, 50, 90, 99)}
        return Pace(steps=self.steps, **_describe(self._kept_S3, percentiles)) if self.steps else Pace()


def _describe(rows_S3: np.ndarray, percentiles: dict[str, int]) -> dict[str, Any]:
    ms_S, (step_s, input_s, busy_s) = rows_S3[:, 0] * 1000, rows_S3.sum(0)
    statistics = {"mean": ms_S.mean()} | {name: np.percentile(ms_S, number) for name, number in percentiles.items()}
    statistics["max"] = ms_S.max()
    parts_s = (("input_share", input_s), ("busy_share", busy_s))
    return {
        "step_ms": {name: round(float(value), 3) for name, value in statistics.items()},
        **{name: round(float(part / step_s), 4) if step_s and not np.isnan(part) else None for name, part in parts_s},
    }


def times_from_marks(marks: list[tuple[str, float]]) -> Times:
    """Return the times of completely marked steps from the ordered marks.

    A batch that is requested after the gradients belongs to the next step; waiting for it counts as this task's work.
    """
    rows, begun, requested, waited, computed = [], 0.0, 0.0, 0.0, None
    for event, moment in marks:
        if event == "begin":
            if computed is not None:
                rows.append((moment - begun, waited, computed - begun))
            begun = requested = moment
            waited, computed = 0.0, None
        elif event == "asks":
            requested = moment
        elif event == "batch":
            waited += moment - requested
            computed = None if computed is None else computed + moment - requested
        else:
            computed = moment
    return Times(*np.array(rows, np.float64).reshape(-1, 3).T)
