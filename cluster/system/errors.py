"""Errors that users see: the value, what was expected, what to do next; and the exit code they end with.

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
"""The code of any program that SIGHUP ends; the run continues."""
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""The code of any program that SIGPIPE ends, as `| head` does."""

EXIT_BUG = 70
"""Between a program and its agent: an unknown error (EX_SOFTWARE of sysexits.h), after which the agent tries again."""
EXIT_PEER_LOST = 75
"""Between a program and its agent: it ended because another task did (EX_TEMPFAIL of sysexits.h), try again."""


class ClusterError(Exception):
    """An error that is reported to the user in one line, without a traceback."""

    exit_code = EXIT_FAILED


class RunFailed(ClusterError):
    """The run itself failed: a task died for good, the loss was NaN, the disk was full."""


class UsageError(ClusterError):
    """The request cannot be carried out as it stands. Nothing was started."""

    exit_code = EXIT_USAGE


class PrerequisiteError(ClusterError):
    """Something this machine must have is missing; the message says how to get it."""

    exit_code = EXIT_PREREQUISITE


class TimedOut(ClusterError):
    """Something bounded took longer than its bound; the message names it."""

    exit_code = EXIT_TIMEOUT


def reports_errors(program: Callable[P, int]) -> Callable[P, int]:
    """Decorator for a program that returns its exit code: a `ClusterError` is reported in one line with its code."""

    @functools.wraps(program)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            return program(*arguments, **options)
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    return wrapped


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name nearest to `name`, or the whole list where none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
