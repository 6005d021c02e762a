"""The output of this process: lines that fit the terminal, if it is one, and other output redirected or silenced."""

import contextlib
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from cluster.system.messages import NOISE

WIDE = 10_000
"""The width of output without a terminal."""
MAX_INDENT = 16

_LABEL = re.compile(r"\s*\S+(?: \S+)?\s{2,}")
"""A line's label, below which its wrapped text does not continue."""
_COMMAND = re.compile(r"`[^`]+`")


def terminal_width(descriptor: int = 1) -> int:
    """Return the width of a line, from the variable COLUMNS or the terminal on a descriptor."""
    with contextlib.suppress(KeyError, ValueError):
        if (width := int(os.environ["COLUMNS"])) > 0:
            return width
    with contextlib.suppress(OSError):
        return os.get_terminal_size(descriptor).columns or WIDE
    return WIDE


def fit(lines: Iterable[str], width: int | None = None) -> list[str]:
    """Wrap lines that are wider than the terminal between words; commands in backticks are not split."""
    width = terminal_width() if width is None else width
    return [part for line in lines for part in ([line] if len(line) <= width else _wrapped(line, width))]


def _wrapped(line: str, width: int) -> list[str]:
    label = _LABEL.match(line)
    indent = " " * (label.end() if label and label.end() <= MAX_INDENT else len(line) - len(line.lstrip()) or 2)
    if label and " " not in line[label.end() :]:
        return [line]  # a label and a path
    parts = textwrap.wrap(
        _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), line),
        width,
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace("\0", " ") for part in parts]


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, wrapped to the terminal, and flush them."""
    for line in fit(lines):
        print(line, file=file, flush=True)


def warn(message: str) -> None:
    """Print a warning to stderr, as standard output may be JSON."""
    print(f"warning: {message}", file=sys.stderr)


def print_wait(line: str) -> None:
    """Print what a command waits for, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(error_text(line), file=sys.stderr, flush=True)


def error_text(message: str) -> str:
    """Return an error message, wrapped if stderr is a terminal."""
    return "\n".join(fit(message.splitlines(), terminal_width(2))) if sys.stderr.isatty() else message


@contextlib.contextmanager
def redirected(targets: Mapping[int, int]) -> Iterator[None]:
    """Context manager that redirects standard output, 1, or error, 2, to other descriptors, even for native code."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    flush()
    own = {number: os.dup(number) for number in targets}
    for number, target in targets.items():
        os.dup2(target, number)
    try:
        yield
    finally:
        flush()
        for number, kept in own.items():
            os.dup2(kept, number)
            os.close(kept)


@contextlib.contextmanager
def outliving_reader() -> Iterator[None]:
    """Context manager that discards the output from here on if its reader has ended, as Ctrl-C also ends `tee`."""
    try:
        yield
    except BrokenPipeError:
        null, out, err = os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno(), sys.stderr.fileno()
        for closed in [err, out] if os.path.sameopenfile(err, out) else [out]:
            os.dup2(null, closed)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Context manager that holds back stderr, and prints all except the noise at the end."""
    with tempfile.TemporaryFile() as held:
        try:
            with redirected({2: held.fileno()}):
                yield
        finally:
            held.seek(0)
            for line in held:
                if not any(part in line for part in NOISE):
                    os.write(2, line)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Context manager that discards the output of this process, including that of native code."""
    with Path(os.devnull).open("wb") as nowhere, redirected({1: nowhere.fileno(), 2: nowhere.fileno()}):
        yield
