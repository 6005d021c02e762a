"""Text for a terminal: aligned columns, and nothing that would steer it."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ParamSpec

from cluster.system.messages import plain

WIDE = 10_000
"""Columns are as wide as their longest cell: what a terminal cannot show of a line is cut off or wrapped there."""


def columns(rows: Iterable[Sequence[object]], *, right: Collection[int] = ()) -> list[str]:
    """Return rows as lines of aligned columns.

    Args:
        rows: cells, equally many in each row; what would steer a terminal is made harmless.
        right: the indices of the columns that are aligned to the right, as numbers are.
    """
    from rich.console import Console  # here, because most commands show no columns
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(plain(str(cell))) for cell in row] for row in rows]
    grid = Table.grid(padding=(0, 2))
    for at in range(len(cells[0]) if cells else 0):
        grid.add_column(justify="right" if at in right else "left", no_wrap=True)
    for row in cells:
        grid.add_row(*row)
    console = Console(file=io.StringIO(), width=WIDE, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().splitlines()]


P = ParamSpec("P")


def plain_lines(lines: Callable[P, list[str]]) -> Callable[P, list[str]]:
    """Escape what a terminal would obey in a function's lines: run folders hold what the tasks' programs wrote."""

    @functools.wraps(lines)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> list[str]:
        return [plain(line) for line in lines(*arguments, **options)]

    return wrapped
