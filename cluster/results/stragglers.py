"""Who is slower than the others, and who waits for input: judged by what each task tells of its own steps.

Under a synchronous strategy all steps take as long as the slowest task's, so tasks are compared by the part of it in
which each is busy: waiting for its batch, and computing its own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

SLOWER = 1.25
"""How many times as long a task must be busy as the others, to be told of."""
EXCESS_MS = 1.0
"""And how much longer at least: the shortest steps differ by chance."""
STARVED = 0.1
"""The share of its steps that a task must wait for input, to be told of."""


@dataclass(frozen=True)
class Straggler:
    """A task that all others wait for."""

    task: str
    slower: float
    """How many times as long it is busy as the others, by their median."""
    input_part: float
    """Which part of the difference is waiting for input."""

    def __str__(self) -> str:
        return f"{self.task} is {self.slower:.1f}x slower, {self.input_part:.0%} of it in input".replace("%", " %")


@dataclass(frozen=True)
class Starved:
    """A task that waits for its input."""

    task: str
    input_share: float
    """Of the time of its steps."""

    def __str__(self) -> str:
        return f"{self.task} waits {self.input_share:.0%} of the time for input".replace("%", " %")


def stragglers(paces: Mapping[str, Mapping[str, Any]]) -> list[Straggler]:
    """Return the tasks that are slower than the others, the slowest first.

    Args:
        paces: by the task's name `step_ms` (its `mean`), `busy_share` and `input_share`, as a heartbeat has them. What
            has none of them, or no shares, is left out.
    """
    known = {name: _busy_and_input(pace) for name, pace in paces.items() if _measured(pace)}
    found = []
    for name, (busy, waiting) in known.items():
        others = [parts for other, parts in known.items() if other != name]
        if not others:
            continue
        usual, usual_waiting = (median(column) for column in zip(*others, strict=True))
        excess = busy - usual
        if usual > 0 and busy >= SLOWER * usual and excess >= EXCESS_MS:
            part = min(1.0, max(0.0, (waiting - usual_waiting) / excess))
            found.append(Straggler(name, round(busy / usual, 2), round(part, 2)))
    return sorted(found, key=lambda straggler: -straggler.slower)


def starved(paces: Mapping[str, Mapping[str, Any]]) -> list[Starved]:
    """Return the tasks that wait for input, the hungriest first."""
    shares = {name: pace["input_share"] for name, pace in paces.items() if _measured(pace)}
    found = [Starved(name, round(share, 2)) for name, share in shares.items() if share >= STARVED]
    return sorted(found, key=lambda task: -task.input_share)


def findings(paces: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return both, as JSON."""
    return {
        "stragglers": [vars(found) for found in stragglers(paces)],
        "starved": [vars(found) for found in starved(paces)],
    }


def lines(value: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return such findings as lines of text; a straggler's input is told once."""
    slow = [Straggler(**found) for found in value.get("stragglers", [])]
    told = {found.task for found in slow if found.input_part >= STARVED}
    hungry = [Starved(**found) for found in value.get("starved", []) if found["task"] not in told]
    return [str(found) for found in (*slow, *hungry)]


def _measured(pace: Mapping[str, Any]) -> bool:
    mean_ms = (pace.get("step_ms") or {}).get("mean")
    return None not in (mean_ms, pace.get("busy_share"), pace.get("input_share"))


def _busy_and_input(pace: Mapping[str, Any]) -> tuple[float, float]:
    mean_ms = pace["step_ms"]["mean"]
    return mean_ms * pace["busy_share"], mean_ms * pace["input_share"]
