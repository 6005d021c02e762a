"""Results of programs that call the user's code, kept until something that they depend on changes.

A result depends on its command, the environment, the installed packages and our code, and on the size and times of the
files that the program imported and of those that its Python code opened or listed. Not tracked: files that are
examined but not opened, such as for their existence; paths relative to a descriptor (`dir_fd`); files that libraries
open in C or C++ (HDF5, TFRecord); child processes, the network, the time, random numbers.
"""

import contextlib
import functools
import hashlib
import importlib.machinery
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import source_from_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.system.files import ROOT
from cluster.system.json_files import read_json, write_json

VOLATILE = ("_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES")
"""Variables that differ between calls from the same shell."""
KEPT = 50
READING = ("open", "os.listdir", "os.scandir")
"""The events of Python's audit hooks that name a file or folder; see the table in Python's documentation."""
MODULES = (*importlib.machinery.all_suffixes(), ".dist-info")
"""Suffixes of importable entries in a folder of `sys.path`."""
State = tuple[int, ...]

_opened: set[str] = set()


def locate(data: Path, command: Sequence[str], environment: Mapping[str, str], depends_on: Iterable[Path] = ()) -> Path:
    """Return the file, below `data`, for a result.

    Its name depends on the command, the environment, the current folder, these files, and the names of the modules in
    the folders of the environment's PYTHONPATH, where a new one could take another's place.
    """
    known = map(str, [*(ROOT / "train").rglob("*.py"), *(ROOT / "train").rglob("*.toml"), *depends_on])
    states = sorted((file, state_of(file)) for file in known)
    variables = {name: value for name, value in environment.items() if name not in VOLATILE}
    packages = Path(sysconfig.get_path("purelib"))  # its time changes with every installation
    versions = [sys.version, str(packages), packages.stat().st_mtime_ns, str(Path.cwd())]
    folders = [Path(folder) for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    modules = [sorted(filter(is_module, map(str, folder.glob("*")))) for folder in folders]
    text = json.dumps([list(command), variables, versions, states, modules], sort_keys=True)
    return data / "results" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def recall(file: Path) -> tuple[dict[str, Any], str] | None:
    """Return the kept result and what its program printed; None if there is none, or if an input has changed."""
    with _unrecorded(), contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = read_json(file)
        if all([*state_of(name)] == state for name, state in kept["files"].items()):
            return {**kept["value"]}, str(kept["printed"])
    return None


def keep(file: Path, began: float, reply: dict[str, Any], printed: str) -> None:
    """Keep the reply of a program that began at this time, in seconds since the epoch, and what it printed.

    Nothing is kept if an opened file was changed since.
    """
    with _unrecorded(), contextlib.suppress(OSError):  # the program then runs again next time
        states = {name: state_of(name) for name in reply["opened"] + reply["written"]}
        opened = [states[name] for name in {*reply["opened"]} - {*reply["written"]}]
        if any(state and max(state[-2:]) >= began * 1e9 for state in opened):  # its times
            return
        write_json(file, {"files": states, "value": reply["value"], "printed": printed})
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Context manager whose files are no inputs of the user's code."""
    before = {*_opened}
    yield
    _opened.intersection_update(before)


@functools.cache  # a hook stays for good
def watch() -> None:
    """Begin to record the files and folders that Python code in this process opens for reading, or lists."""
    _outside()  # before the user's code can change the temporary folder
    sys.addaudithook(_record)


def opened() -> list[str]:
    """Return the files of the user's imported modules, and the files and folders opened since `watch`."""
    return sorted(filter(is_users, _opened | {str(Path(file).absolute()) for file in imported()}))


def is_module(path: str) -> bool:
    """Whether an entry of a folder in `sys.path` is a module, a package or an installed distribution."""
    return path.endswith(MODULES) or os.access(f"{path}/__init__.py", os.F_OK)


def imported() -> Iterator[str]:
    """Yield the files of all modules, without triggering the import of lazy modules."""
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType):
            file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
            if isinstance(file, str):
                yield file


def state_of(path: str) -> State:
    """Return metadata that changes with a file's content; the last value is its ctime, which cannot be set."""
    try:
        status = os.stat(path)  # noqa: PTH116  # of thousands of files
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_users(path: str) -> bool:
    """Whether a file is neither ours, nor installed with Python, nor generated by this process or by the system."""
    device = path.startswith("/dev/") and not path.startswith("/dev/shm/")  # noqa: S108  # users keep data there
    return path.startswith("/") and not device and not f"{path}/".startswith(_outside())


@functools.cache
def _outside() -> tuple[str, ...]:
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = [*installed, f"{ROOT}/cluster", f"{ROOT}/train", tempfile.gettempdir(), "/proc", "/sys"]
    return tuple(f"{folder}/" for folder in others)


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if not READING or event not in READING:  # at the end of Python its value is None
        return
    with contextlib.suppress(Exception):  # an exception here would end the user's own call
        path, flags = arguments[0], arguments[2] if event == "open" else 0
        reads = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_DIRECTORY
        imports = sys._getframe(1).f_code.co_filename.startswith(("<frozen importlib", importlib.__path__[0]))
        if reads and not (imports and event == "os.listdir"):  # see `locate`
            file = os.fsdecode(path)
            _opened.add(str(Path(source_from_cache(file) if imports and file.endswith(".pyc") else file).absolute()))
