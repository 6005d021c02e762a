"""Words for numbers, the same in every message."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return `1 task`, `2 tasks`: the noun is regular."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
