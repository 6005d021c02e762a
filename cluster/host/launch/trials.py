"""Results of trials of a user's model, which are not repeated while everything that they depend on is the same.

That is the request, the environment, the program, the installed packages, the prepared data, and the content of every
file of the user's modules and their imports. A file that a function opens by itself is not known; the tasks check what
they load.
"""

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.system import files
from cluster.system.json_files import read_json, write_json
from cluster.system.paths import ROOT

VOLATILE = ("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES")
"""Variables that differ between calls from the same shell."""
KEPT = 50


def recall_trial(file: Path) -> dict[str, Any] | None:
    """Return the result of an earlier trial from its file, and print again what it printed.

    None if there is none, or a module has changed since.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = read_json(file)
        if all(files.sha256(Path(name)) == digest for name, digest in kept["files"].items()):
            result: dict[str, Any] = dict(kept["result"])
            print(kept["printed"], end="", file=sys.stderr)
            return result
    return None


def keep_trial(file: Path, began: float, result: dict[str, Any], printed: str) -> None:
    """Keep the result of a trial, which has the files of the modules that it imported, and what it printed.

    `began` is its time in seconds since the epoch: a module that was edited later may not be the one that it tried.
    """
    paths = [Path(name) for name in result.pop("files")]
    with contextlib.suppress(OSError):  # then the next one is made again
        digests = {str(path): files.sha256(path) for path in paths}
        if any(path.stat().st_mtime >= began for path in paths):
            return
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"files": digests, "result": result, "printed": printed})
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def locate_trial(data_dir: Path, command: Sequence[str], path: Sequence[str]) -> Path:
    """Return the file of the trial by a command, in this environment and with the data as it is."""
    known = [*(ROOT / "train").rglob("*.py"), *(ROOT / "train").rglob("*.toml"), *data_dir.glob("*/*/*.json")]
    states = sorted(_state(file) for file in known)
    variables = {name: value for name, value in os.environ.items() if name not in VOLATILE}
    packages = Path(sysconfig.get_path("purelib"))  # its time changes with every installation
    versions = [sys.version, str(packages), packages.stat().st_mtime_ns]
    depends_on = json.dumps([list(command), list(path), variables, versions, states], sort_keys=True)
    return data_dir / "trials" / f"{hashlib.sha256(depends_on.encode()).hexdigest()[:32]}.json"


def _state(file: Path) -> tuple[str, int, int]:
    """Return what changes with a file's content; another command may have just removed the file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return str(file), 0, 0
    return str(file), status.st_size, status.st_mtime_ns
