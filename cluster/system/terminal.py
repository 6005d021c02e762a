"""Lines that fit into the terminal; a file or a program gets them whole."""

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

WIDE = 10_000
"""The width of output without a terminal."""
MAX_INDENT = 16

_LABEL = re.compile(r"\s*\S+(?: \S+)?\s{2,}")
"""A line's label, below which its wrapped text does not continue."""
_COMMAND = re.compile(r"`[^`]+`")


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


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print lines as they fit into the terminal, at once."""
    print("\n".join(fit(lines)), file=file, flush=True)


def print_wait(line: str) -> None:
    """Print what a command waits for to somebody who watches; a program that reads the output does not get it."""
    if sys.stderr.isatty():
        print(error_text(line), file=sys.stderr, flush=True)


def error_text(message: str) -> str:
    """Return an error's message as it fits into the terminal; a program that reads it gets one line."""
    return "\n".join(fit(message.splitlines(), terminal_width(2))) if sys.stderr.isatty() else message
