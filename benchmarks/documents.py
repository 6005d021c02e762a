"""Tables in documents that a command updates, each between two marker lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.system.errors import ClusterError
from cluster.system.messages import short_path

END = "<!-- its end -->"


def begin(command: str) -> str:
    """Return the marker line before the table that a command updates."""
    return f"<!-- the table that `{command}` renews -->"


def written(path: Path, begin: str) -> list[str]:
    """Return the lines of a document's table after the marker line `begin`."""
    _, found, rest = path.read_text().partition(f"{begin}\n")
    inside, end, _ = rest.partition(f"{END}\n")
    if not found or not end:
        raise ClusterError(f"{short_path(path)} has no lines {begin!r} and {END!r}; put them where the table belongs")
    return inside.splitlines()


def renew(paths: Sequence[Path], begin: str, lines: Sequence[str]) -> None:
    """Replace the table after the marker line `begin` in every document, or in none if one lacks the marker."""
    texts = {}
    for path in paths:
        old = "\n".join([begin, *written(path, begin), END, ""])
        texts[path] = path.read_text().replace(old, "\n".join([begin, *lines, END, ""]))
    for path, text in texts.items():
        path.write_text(text)
