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


def recall_trial(data_dir: Path, command: Sequence[str], path: Sequence[str]) -> dict[str, Any] | None:
    """Return the result of an earlier trial like this one, and print again what it printed.

    None if there is none, or anything has changed since.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = read_json(_file(data_dir, command, path))
        if all(files.sha256(Path(name)) == digest for name, digest in kept["files"].items()):
            result: dict[str, Any] = dict(kept["result"])
            print(kept["printed"], end="", file=sys.stderr)
            return result
    return None


def keep_trial(
    data_dir: Path, command: Sequence[str], path: Sequence[str], result: dict[str, Any], printed: str
) -> None:
    """Keep the result of a trial, which has the files of the modules that it imported, and what it printed."""
    names = result.pop("files")
    with contextlib.suppress(OSError):  # then the next one is made again
        digests = {name: files.sha256(Path(name)) for name in names}
        file = _file(data_dir, command, path)
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"files": digests, "result": result, "printed": printed})
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _file(data_dir: Path, command: Sequence[str], path: Sequence[str]) -> Path:
    known = [*(ROOT / "train").rglob("*.py"), *(ROOT / "train").rglob("*.toml"), *data_dir.glob("*/*/*.json")]
    states = sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in known)
    variables = {name: value for name, value in os.environ.items() if name not in VOLATILE}
    packages = Path(sysconfig.get_path("purelib"))  # its time changes with every installation
    versions = [sys.version, str(packages), packages.stat().st_mtime_ns]
    depends_on = json.dumps([list(command), list(path), variables, versions, states], sort_keys=True)
    return data_dir / "trials" / f"{hashlib.sha256(depends_on.encode()).hexdigest()[:32]}.json"
