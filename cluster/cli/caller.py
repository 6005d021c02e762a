"""What the caller of a command brings along that would change how our own programs run, put right before they do."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from cluster.errors import UsageError

KEPT = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
"""Python's own variables that our programs take over; others change where they find modules, what they skip of
them, or whether they end (PYTHONSAFEPATH, PYTHONOPTIMIZE, PYTHONHOME, PYTHONINSPECT)."""


def settle() -> None:
    """Leave out of the environment what must not reach our programs, and print also what an encoding cannot hold.

    Raises:
        UsageError: the current folder was removed.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder is no more; change to one that there is, and try again") from None
    for name in [name for name in os.environ if name.startswith("PYTHON") and name not in KEPT]:
        del os.environ[name]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
