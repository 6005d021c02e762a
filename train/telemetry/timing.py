"""How fast the steps of one generation of a task are: a few numbers, bounded however many steps there are.

Shapes: S steps; columns: whole step, input, busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.contract.run.records import Pace

RECENT = 200
"""Steps that the heartbeat reports."""
KEPT = 4096
"""Most steps that are kept: then every second one goes, and of the later ones as many."""
PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True)
class Times:
    """What some optimizer steps of one task took, or a sample of them, in seconds. None: unknown there."""

    steps: np.ndarray
    """`[S] float64`: whole steps, waiting for other tasks included."""
    inputs: np.ndarray | None = None
    """`[S] float64`: waiting for the batch."""
    busy: np.ndarray | None = None
    """`[S] float64`: until the batch was there and the task's own gradients were computed."""

    @property
    def input_share(self) -> float:
        """Which part of the time the batches were waited for; 0 where that is unknown."""
        return 0.0 if self.inputs is None or not self.steps.any() else float(self.inputs.sum() / self.steps.sum())


class StepTiming:
    """Collects what the steps of one generation take."""

    def __init__(self) -> None:
        self._recent_S3 = np.zeros((0, 3))
        self._kept_S3 = np.zeros((0, 3))
        self._stride = 1
        self._ahead = 0
        self._max_s = 0.0
        self.steps = 0
        """How many were measured."""

    def add(self, times: Times) -> None:
        """Take some steps into account."""
        unknown_S = np.full(len(times.steps), np.nan)
        parts = (times.steps, *(unknown_S if part is None else part for part in (times.inputs, times.busy)))
        rows_S3 = np.stack(parts, 1)
        self.steps += len(rows_S3)
        self._max_s = max(self._max_s, *times.steps.tolist(), 0.0)
        self._recent_S3 = np.concatenate([self._recent_S3, rows_S3])[-RECENT:]
        self._kept_S3 = np.concatenate([self._kept_S3, rows_S3[self._ahead :: self._stride]])
        self._ahead = (self._ahead - len(rows_S3)) % self._stride
        while len(self._kept_S3) > KEPT:
            self._ahead = (self._ahead + (len(self._kept_S3) % 2) * self._stride) % (2 * self._stride)
            self._kept_S3, self._stride = self._kept_S3[::2], 2 * self._stride

    def recent(self) -> dict[str, Any]:
        """Return what the heartbeat says of the newest steps; nothing before there are any."""
        if not self.steps:
            return {}
        ms_S = self._recent_S3[:, 0] * 1000
        found = {"mean": ms_S.mean(), "median": np.median(ms_S), "p90": np.percentile(ms_S, 90), "max": ms_S.max()}
        return {"step_ms": _rounded(found), **_shares(self._recent_S3)}

    def generation(self) -> Pace:
        """Return the pace of all steps of this generation."""
        if not self.steps:
            return Pace()
        ms_S = self._kept_S3[:, 0] * 1000
        found = {
            "mean": ms_S.mean(),
            **{f"p{p}": np.percentile(ms_S, p) for p in PERCENTILES},
            "max": self._max_s * 1000,
        }
        return Pace(steps=self.steps, step_ms=_rounded(found), **_shares(self._kept_S3))

    def histograms(self) -> dict[str, np.ndarray]:
        """Return the milliseconds of the steps, and of their parts where these are known: `[S]` each."""
        parts = dict(zip(("step_ms", "input_ms", "busy_ms"), self._kept_S3.T * 1000, strict=True))
        return {name: ms_S for name, ms_S in parts.items() if len(ms_S) and not np.isnan(ms_S).any()}


def _shares(rows_S3: np.ndarray) -> dict[str, Any]:
    """Return which share of the time went into the input, and into the task's own work with it."""
    step_s, input_s, busy_s = rows_S3.sum(0)
    shares = {"input_share": input_s / step_s, "busy_share": busy_s / step_s} if step_s else {}
    return {
        name: None if np.isnan(share := shares.get(name, np.nan)) else round(float(share), 4)
        for name in ("input_share", "busy_share")
    }


def _rounded(values: dict[str, Any]) -> dict[str, float | None]:
    return {name: round(float(value), 3) for name, value in values.items()}


def from_marks(marks: list[tuple[str, float]]) -> Times:
    """Return the times of the steps that were marked whole, by the marks in their order.

    A batch that is requested after the gradients is the next step's; to wait for it is work of this task, too.
    """
    rows, begun, requested, waited, computed = [], 0.0, 0.0, 0.0, None
    for what, moment in marks:
        if what == "begin":
            if computed is not None:
                rows.append((moment - begun, waited, computed - begun))
            begun = requested = moment
            waited, computed = 0.0, None
        elif what == "asks":
            requested = moment
        elif what == "batch":
            waited += moment - requested
            computed = None if computed is None else computed + moment - requested
        else:
            computed = moment
    return Times(*np.array(rows, np.float64).reshape(-1, 3).T)
