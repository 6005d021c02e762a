"""Text for a terminal: aligned columns, and nothing that would steer it."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import ParamSpec

from cluster.system.messages import plain
from cluster.system.terminal import WIDE, fit, terminal_width

MIN_ROOM = 30
"""A last column narrower than this is shown below its row instead."""


def columns(rows: Iterable[Sequence[object]], *, right: Collection[int] = (), width: int | None = None) -> list[str]:
    """Return rows as lines of aligned columns; where they do not fit, the last one is wrapped, or below its row.

    Args:
        rows: cells, equally many in each row; what would steer a terminal is made harmless.
        right: the indices of the columns that are aligned to the right, as numbers are.
        width: of a line; None: the terminal's.
    """
    from rich.console import Console  # here, because most commands show no columns
    from rich.table import Table
    from rich.text import Text

    width = terminal_width() if width is None else width
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    count = len(cells[0]) if cells else 0
    room = width - sum(max(map(len, column)) + 2 for column in list(zip(*cells, strict=True))[:-1])
    if count - 1 in right or all(len(row[-1]) <= room for row in cells):
        room = WIDE
    elif room < MIN_ROOM:
        heads = columns([row[:-1] for row in cells], right=right, width=width)
        return [line for head, row in zip(heads, cells, strict=True) for line in (head, *_below(row[-1], width))]
    grid = Table.grid(padding=(0, 2))
    for at in range(count):
        grid.add_column(justify="right" if at in right else "left", no_wrap=True)
    for row in cells:
        for line in _folded(row, room):
            grid.add_row(*map(Text, line))
    console = Console(file=io.StringIO(), width=WIDE, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().splitlines()]


def _below(text: str, width: int) -> list[str]:
    return fit([f"    {text}"], width) if text else []


def _folded(row: Sequence[str], room: int) -> Iterator[Sequence[str]]:
    """Yield a row with its last cell wrapped, in rows of which all but the first have only that cell."""
    *others, last = row
    first, *rest = fit([last], room)
    yield (*others, first)
    for part in rest:
        yield (*[""] * len(others), part.strip())


def chosen_columns(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str],
    spare: Sequence[str],
    width: int | None = None,
) -> list[str]:
    """Return a table without the columns that do not fit.

    Args:
        names: of the columns.
        rows: cells, as many as there are names in each row.
        right: the names of the columns that are aligned to the right.
        spare: the names of the columns that may be left out, in this order.
        width: of a line; None: the terminal's.
    """
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


P = ParamSpec("P")


def plain_lines(lines: Callable[P, list[str]]) -> Callable[P, list[str]]:
    """Escape what a terminal would obey in a function's lines, which may come from tasks' programs, and fit them."""

    @functools.wraps(lines)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> list[str]:
        return fit(plain(line) for line in lines(*arguments, **options))

    return wrapped
