"""User-facing errors and exit codes. A message has the invalid value, the expected one, and what to do next.

Exit codes are the same everywhere: 0 done, 1 the run failed, 2 wrong usage, 3 a prerequisite is missing, 4 timed out,
129 the terminal was closed, 130 interrupted, 141 the output is not read.
"""

import difflib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec

P = ParamSpec("P")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREREQUISITE = 3
EXIT_TIMEOUT = 4
EXIT_HUNG_UP = 129
"""The code of a program that is ended by SIGHUP; the run continues."""
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""The code of a program that is ended by SIGPIPE, for instance by `| head`."""

EXIT_BUG = 70
"""A program's code for its agent: an unknown error (EX_SOFTWARE of sysexits.h), to be retried."""
EXIT_PEER_LOST = 75
"""A program's code for its agent: another task was lost (EX_TEMPFAIL of sysexits.h), to be retried."""
EXIT_CANCELLED = 76
"""A program's code for its agent: its step was cancelled by an error of this task or of another, to be retried."""


class ClusterError(Exception):
    """An error that is reported to the user in one line, without a traceback."""

    exit_code = EXIT_FAILED


class RunFailed(ClusterError):
    """The run itself failed: for instance, a task kept failing, the loss was NaN or the disk was full."""


class UsageError(ClusterError):
    """The request is invalid. Nothing was started."""

    exit_code = EXIT_USAGE


class PrerequisiteError(ClusterError):
    """This machine lacks a prerequisite; the message says how to provide it."""

    exit_code = EXIT_PREREQUISITE


class TimedOut(ClusterError):
    """An operation exceeded its timeout; the message names both."""

    exit_code = EXIT_TIMEOUT


def reports_errors(program: Callable[P, int]) -> Callable[P, int]:
    """Decorator for a program that returns an exit code: prints a `ClusterError` in one line and returns its code."""

    @functools.wraps(program)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            return program(*arguments, **options)
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    return wrapped


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known name that is closest to `name`, or list all if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
