"""Text for a terminal: aligned columns, sparklines, and escaped control characters."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ParamSpec, TypeVar

from cluster.system.messages import plain
from cluster.system.terminal import WIDE, fit, terminal_width

P = ParamSpec("P")
T = TypeVar("T")
MIN_ROOM = 30
"""If the last column has less room than this, its cells are printed below their rows."""
_BARS = "▁▂▃▄▅▆▇█"


def columns(rows: Iterable[Sequence[object]], *, right: Collection[int] = (), width: int | None = None) -> list[str]:
    """Format rows as aligned columns; if they are too wide, wrap the last column or print it below its row.

    Control characters are escaped. The columns with the indices `right` are right-aligned, for numbers.
    """
    width = terminal_width() if width is None else width
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    if not cells:
        return []
    sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(sizes) - 1
    room = width - sum(size + 2 for size in sizes[:-1])
    wraps = last not in right and sizes[-1] > room
    lines = []
    for row in cells:
        padded = [row[at].rjust(size) if at in right else row[at].ljust(size) for at, size in enumerate(sizes)]
        if not wraps:
            lines.append("  ".join(padded).rstrip())
        elif room < MIN_ROOM:
            lines.append("  ".join(padded[:-1]).rstrip())
            lines += fit([f"    {row[-1]}"], width) if row[-1] else []
        else:
            first, *rest = fit([row[-1]], room)
            lines.append("  ".join([*padded[:-1], first]).rstrip())
            lines += [" " * (width - room) + part.strip() for part in rest]
    return lines


def chosen_columns(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str],
    spare: Sequence[str],
    width: int | None = None,
) -> list[str]:
    """Format a table that fits the width, if necessary without the columns in `spare`, dropped in this order."""
    width = terminal_width() if width is None else width
    cells = [names, *rows]
    kept = list(names)
    for left_out in ("", *spare):
        kept = [name for name in kept if name != left_out]
        places = [names.index(name) for name in kept]
        shown = [[row[at] for at in places] for row in cells]
        lines = columns(shown, right=[at for at, name in enumerate(kept) if name in right], width=WIDE)
        if max(map(len, lines)) <= width:
            break
    return lines


def cell(value: object, form: str = "{}") -> str:
    """Format the value of a table's cell; a dash for None or an empty string."""
    return "-" if value is None or value == "" else form.format(value)


def plain_lines(lines: Callable[P, list[str]]) -> Callable[P, list[str]]:
    """Decorator that escapes control characters in a function's lines, which may be untrusted, and wraps the lines."""

    @functools.wraps(lines)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> list[str]:
        return fit(plain(line) for line in lines(*arguments, **options))

    return wrapped


def thinned(values: Iterable[T], most: int) -> list[T]:
    """Return at most `most` evenly spaced values, including the last."""
    values = list(values)
    if len(values) <= most:
        return values
    stride = -(-len(values) // (most - 1))
    return [*values[:-1:stride], values[-1]]


def sparkline(values: Iterable[float], width: int = 24) -> str:
    """Format values as a sparkline such as `█▆▃▂▁`; empty for fewer than two values."""
    shown = thinned(values, width)
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)
