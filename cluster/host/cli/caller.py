"""Normalise the caller's environment, which would otherwise change how our own programs run."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from cluster.system.errors import UsageError

KEPT = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
"""Python's own variables that our programs inherit; others change where they find modules, what they skip of them, or
whether they end (PYTHONSAFEPATH, PYTHONOPTIMIZE, PYTHONHOME, PYTHONINSPECT)."""


def normalise() -> None:
    """Remove the variables that must not reach our programs, and print what an encoding cannot hold as escapes.

    Raises:
        UsageError: the current folder was removed.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder was removed; change to one that exists, and try again") from None
    for name in [name for name in os.environ if name.startswith("PYTHON") and name not in KEPT]:
        del os.environ[name]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def has_closed_output() -> bool:
    """Return whether nobody reads the output; the rest is then discarded, so that Python's own flush does not fail."""
    closed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return closed
