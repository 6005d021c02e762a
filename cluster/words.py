"""Words for numbers, the same in every message, and text that a terminal only shows."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return `1 task`, `2 tasks`: the noun is regular."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain(text: str) -> str:
    r"""Return a line with everything that could steer a terminal, or pass for another line, written as `\x1b`."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
