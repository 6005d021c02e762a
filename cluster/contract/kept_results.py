"""Results of programs that call the user's code, kept until something that they depend on changes.

A result depends on its command, the environment, the installed packages and our code; on the modules that the program
imported, by content; and on the files and folders that its Python code opened or listed, by size and time. Not tracked:
whether a file exists, what libraries open in C or C++ (HDF5, TFRecord), child processes, the network, the time and
random numbers.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cluster.system import files
from cluster.system.json_files import read_json, write_json
from cluster.system.paths import ROOT

VOLATILE = ("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES")
"""Variables that differ between calls from the same shell."""
KEPT = 50
READING = ("open", "os.listdir", "os.scandir")
"""The events of Python's audit hooks that name a file or folder; see the table in Python's documentation."""

_opened: set[str] = set()

State = list[int] | None
"""Size, modification time in nanoseconds and inode of a file; None if there is none."""


def locate(data: Path, command: Sequence[str], path: Sequence[str], depends_on: Iterable[Path] = ()) -> Path:
    """Return the file, below `data`, for a result; its name depends on the command, the environment and these files.

    `path` has the folders of the user's modules.
    """
    known = [*(ROOT / "train").rglob("*.py"), *(ROOT / "train").rglob("*.toml"), *depends_on]
    states = sorted((str(file), _state(file)) for file in known)
    variables = {name: value for name, value in os.environ.items() if name not in VOLATILE}
    packages = Path(sysconfig.get_path("purelib"))  # its time changes with every installation
    versions = [sys.version, str(packages), packages.stat().st_mtime_ns]
    text = json.dumps([list(command), list(path), variables, versions, states], sort_keys=True)
    return data / "results" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def recall(file: Path) -> tuple[Any, str] | None:
    """Return the kept result and what its program printed; None if there is none, or if an input has changed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = read_json(file)
        same = all(files.sha256(Path(name)) == digest for name, digest in kept["modules"].items())
        if same and all(_state(Path(name)) == state for name, state in kept["files"].items()):
            return kept["value"], str(kept["printed"])
    return None


def keep(file: Path, began: float, reply: dict[str, Any], printed: str) -> None:
    """Keep the reply of a program that began at this time, in seconds since the epoch, and what it printed.

    Nothing is kept if a module or an opened file was changed since.
    """
    with contextlib.suppress(OSError):  # the program then runs again next time
        modules = {name: files.sha256(Path(name)) for name in reply["modules"]}
        opened = {name: _state(Path(name)) for name in {*reply["opened"]} - {*reply["written"]}}
        states = [*opened.values(), *(_state(Path(name)) for name in modules)]
        if any(state and state[1] >= began * 1e9 for state in states):
            return
        known = opened | {name: _state(Path(name)) for name in reply["written"]}
        write_json(file, {"modules": modules, "files": known, "value": reply["value"], "printed": printed})
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


@functools.cache  # a hook stays for good
def watch() -> None:
    """Begin to record the files and folders that Python code in this process opens for reading, or lists."""
    sys.addaudithook(_record)


def describe_inputs() -> dict[str, list[str]]:
    """Return the files of the user's imported modules and those opened since `watch`, for `keep`."""
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # The temporary folder has files that this process generates; those of the system describe the moment.
    others = [*installed, f"{ROOT}/cluster", f"{ROOT}/train", tempfile.gettempdir(), "/proc", "/sys", "/dev"]
    outside = tuple(f"{folder}/" for folder in others)
    found = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    modules = {str(Path(file).absolute()) for file in found if isinstance(file, str)}
    return {
        name: sorted(path for path in known if not path.startswith(outside))
        for name, known in (("modules", modules), ("opened", {*_opened} - modules))
    }


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if not READING or event not in READING:  # at the end of Python its value is None
        return
    with contextlib.suppress(Exception):  # an exception here would end the user's own call
        path, flags = arguments[0], arguments[2] if event == "open" else 0
        reads = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_DIRECTORY
        # Modules are compared by content, and which one is found does not depend on the other files of a folder.
        if reads and not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
            _opened.add(str(Path(os.fsdecode(path)).absolute()))


def _state(file: Path) -> State:
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]
