"""Results of a benchmark: samples of each variant, their comparison and the goal. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Logged steps: each with `step` and `time`."""


@dataclass(frozen=True)
class Goal:
    """The target of a figure's value."""

    bound: float
    at_least: bool
    """Whether the value must reach `bound`; otherwise it must stay below."""

    def met(self, value: float) -> bool:
        """Return whether a value reaches it; NaN does not."""
        return value >= self.bound if self.at_least else value < self.bound


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    title: str
    unit: str
    """Unit of the samples."""
    variants: Mapping[str, Sequence[float]]
    """Every sample of each variant, in the order of the rounds; ours first."""
    ratios: Sequence[float] = ()
    """Ratio of the compared variants in each round; the title says which over which."""
    form: str = "plain"
    """How the value is shown: `times` (1.31 times), `cost` (4.2 %), `plain` (in the unit)."""
    goal: Goal | None = None
    tried: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Samples of each setting that was tried; the best setting is among the variants."""

    @property
    def value(self) -> float:
        """The median to compare with the goal: of the ratios, minus 1 for a cost; `plain`: of the first variant."""
        if self.form == "plain":
            return self.medians[next(iter(self.variants))]
        return median(self.ratios) - (1 if self.form == "cost" else 0)

    @property
    def medians(self) -> dict[str, float]:
        """The median of each variant's samples."""
        return {name: median(samples) for name, samples in self.variants.items()}

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return None if self.goal is None else self.goal.met(self.value)

    def to_json(self) -> dict[str, Any]:
        """Return the form in `results.json`, without the conditions of the measurement."""
        tried = {name: [round(each, 4) for each in samples] for name, samples in self.tried.items()}
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "variants": [
                {"name": name, "samples": [round(each, 4) for each in samples], "median": round(median(samples), 4)}
                for name, samples in self.variants.items()
            ],
            "ratios": [round(each, 4) for each in self.ratios],
            "ratio": round(median(self.ratios), 4) if self.ratios else None,
            "form": self.form,
            "value": round(self.value, 4),
            "goal": None if self.goal is None else {"bound": self.goal.bound, "at_least": self.goal.at_least},
            "met": self.met,
        } | ({"tried": tried} if tried else {})


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return ours divided by the other's, for each pair of samples."""
    return [mine / other for mine, other in zip(ours, others, strict=True)]


def growth(seconds: Mapping[int, Sequence[float]], cores: int) -> list[float]:
    """Return the worst growth of a time in each round, relative to linear growth in tasks per core.

    1 is linear: twice as many tasks per core take twice as long. Up to one task per core none shares its core, so
    growth is counted from there.

    Args:
        seconds: samples, one per round, by the number of tasks.
        cores: number of cores of this machine.
    """
    base = max((count for count in seconds if count <= cores), default=min(seconds))
    more = [count for count in seconds if count > base]
    rounds = range(min(map(len, seconds.values())))
    return [max(seconds[count][at] / seconds[base][at] / (count / max(base, cores)) for count in more) for at in rounds]


def spans(rows: Rows, every: int = 25) -> list[float]:
    """Return the seconds per step between consecutive logged steps, without the first pair, which warms up.

    Args:
        rows: logged steps, in order.
        every: only multiples of this step count, so that both sides of a comparison are cut alike.
    """
    kept = [row for row in rows if row["step"] % every == 0]
    return [(after["time"] - row["time"]) / (after["step"] - row["step"]) for row, after in pairwise(kept)][1:]


def step_seconds(rows: Rows) -> float:
    """Return the median seconds per step."""
    return float(median(spans(rows)))
