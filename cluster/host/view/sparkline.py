"""Values as a line of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_BARS = "▁▂▃▄▅▆▇█"


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Return at most so many values, evenly spaced, with the last."""
    if len(values) <= most:
        return list(values)
    stride = -(-len(values) // (most - 1))
    return [*values[:-1:stride], values[-1]]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return values as a line of blocks, such as `█▆▃▂▁`; empty for fewer than two."""
    shown = thinned(values, width)
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


def bar(share: float, width: int) -> str:
    """Return a progress bar."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)
