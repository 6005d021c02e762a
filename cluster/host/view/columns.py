"""Text for a terminal: aligned columns, lines that fit its width, and nothing that would steer it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import ParamSpec

from cluster.system.messages import plain

WIDE = 10_000
"""The width where there is no terminal: lines are not wrapped for a file or a program."""
MIN_ROOM = 30
"""A last column narrower than this is shown below its row instead."""
MAX_INDENT = 16

_LABEL = re.compile(r"\s*\S+(?: \S+)?\s{2,}")
"""A line's label, below which its wrapped text does not continue."""
_COMMAND = re.compile(r"`[^`]+`")
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""")


def terminal_width(descriptor: int = 1) -> int:
    """Return how many characters fit on a line: the variable COLUMNS, or the width of the terminal on a descriptor."""
    with contextlib.suppress(KeyError, ValueError):
        if (width := int(os.environ["COLUMNS"])) > 0:
            return width
    with contextlib.suppress(OSError):
        return os.get_terminal_size(descriptor).columns or WIDE
    return WIDE


def fit(lines: Iterable[str], width: int | None = None) -> list[str]:
    """Return lines wrapped between words where they are wider than the terminal; a command in backticks stays whole."""
    width = terminal_width() if width is None else width
    return [part for line in lines for part in ([line] if len(line) <= width else _wrapped(line, width))]


def _wrapped(line: str, width: int) -> list[str]:
    label = _LABEL.match(line)
    indent = " " * (label.end() if label and label.end() <= MAX_INDENT else len(line) - len(line.lstrip()) or 2)
    if label and " " not in line[label.end() :]:
        return [line]  # a label and a path
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), line)
    parts = textwrap.wrap(
        whole,
        width,
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace("\0", " ") for part in parts]


def shell_lines(command: str, width: int | None = None) -> list[str]:
    """Return a shell command as lines that can be pasted: each but the last ends with a backslash."""
    width = terminal_width() if width is None else width
    if len(command) <= width:
        return [command]
    lines = [""]
    for word in _SHELL_WORD.findall(command):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > width:
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def print_lines(*lines: str) -> None:
    """Print lines as they fit into the terminal, at once."""
    print("\n".join(fit(lines)), flush=True)


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


def error_text(message: str) -> str:
    """Return an error's message as it fits into the terminal; a program that reads it gets one line."""
    return "\n".join(fit(message.splitlines(), terminal_width(2))) if sys.stderr.isatty() else message
