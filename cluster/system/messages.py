"""Formatting of numbers, paths and errors in messages, and escaping of control characters."""

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from cluster.system.files import ROOT

COMMAND = os.environ.get("INVOKED_AS") or "invoke"
"""The name of the command in messages; see `cluster/launcher.py`."""
NOISE = (b"oneDNN custom operations are on.", b"All log messages before absl::InitializeLog() is called")
"""Parts of uninformative lines that TensorFlow prints at every log level."""


def counted(number: int, noun: str) -> str:
    """Return a number with a regular noun, such as `1 task` or `2 tasks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def either(words: Sequence[str]) -> str:
    """Return `one`, `one or two`, or `one, two or three`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def size(num_bytes: float) -> str:
    """Return a number of bytes as `12.3 MiB`."""
    power = min(4, max(0, int(num_bytes).bit_length() - 1) // 10)
    return f"{num_bytes / 2 ** (10 * power):.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def short_path(path: Path) -> str:
    """Return a path relative to the current folder if it is below it, otherwise unchanged."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def shortened(text: str, most: int) -> str:
    """Cut the middle out of a text that is longer than `most`, since the advice of an error is at its end."""
    if len(text) <= most:
        return text
    tail = most * 3 // 5
    return f"{text[: most - tail - 5].rstrip()} ... {text[-tail:].lstrip()}"


def last_output_line(text: str) -> str:
    """Return the last line that a command printed, at most 200 characters of it."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def plain(text: str) -> str:
    r"""Escape the characters of a line that could control a terminal, or look like a line break, such as `\x1b`."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def described(error: BaseException) -> str:
    """Describe an error of the user's code in one line, with the place where it was raised."""
    if isinstance(error, SystemExit):
        what = f"it ends the program with sys.exit({error.code!r:.80})"
    else:
        try:
            said = str(error)
        except BaseException:  # of the user's `__str__`
            said = "it cannot be shown"
        what = ": ".join(filter(None, (type(error).__name__, " ".join(said.split()))))
    ours = (" (<frozen", *(f" ({ROOT / package}{os.sep}" for package in ("cluster", "train")))
    places = [f" ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    place = "".join(place for place in places if not place.startswith(ours))
    hint = "; install a package by --requirements FILE" if place and isinstance(error, ModuleNotFoundError) else ""
    return plain(what + place + hint)


def system_error(error: OSError) -> str:
    """Describe an error of the operating system with its file."""
    about = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return plain(f"{' and '.join(about) or 'the system'}: {error.strerror or str(error) or type(error).__name__}")
