"""What this process has imported and inherited: whether a process that begins now would differ from it."""

import contextlib
import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

INHERITED = (
    *("Umask:", "Uid:", "Gid:", "Groups:", "SigBlk:", "SigIgn:", "Cap", "NoNewPrivs:", "Seccomp:"),
    *("Cpus_allowed:", "Mems_allowed:"),
)
"""What `/proc/self/status` says of what a process has from its parent."""
IMPORTABLE = (*importlib.machinery.all_suffixes(), ".pth", ".egg-link", ".dist-info")
SETTLED_S = 2.0
"""No file system's times are coarser. A file that changed later could change again and keep its `_state`."""

State = tuple[int, ...]


def circumstances() -> list[str]:
    """Return what a process has from its parent besides its variables, and the Python that it runs, in words."""
    proc = Path("/proc/self")
    lines = [line for line in (proc / "status").read_text().splitlines() if line.startswith(INHERITED)]
    texts = [(proc / name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    spaces = [str(path.readlink()) for path in sorted((proc / "ns").iterdir()) if "_for_" not in path.name]
    schedule = [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)]
    return [*lines, *texts, *spaces, str(schedule), os.path.realpath(sys.executable), sys.version]


def sha256_of(paths: Sequence[Path]) -> str:
    """Return the sha256, in hexadecimal, of the names and contents of files and of all files below folders."""
    digest = hashlib.sha256()
    for path in paths:
        below = [Path(parent, name) for parent, _, names in os.walk(path) for name in names]
        for file in sorted(each for each in below or [path] if each.parent.name != "__pycache__" and each.exists()):
            digest.update(f"{file}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


class Loaded:
    """What this process has imported, as it was on the disk.

    Attributes:
        certain: whether it is certain what was imported. It is not where a file changed shortly before, or meanwhile.
    """

    def __init__(self, own: Sequence[Path], before: str, began: float) -> None:
        """Note what was imported after `began`, in seconds since the epoch.

        Files below `own` are compared by content, any others by what changes with it; `before` is the `sha256_of(own)`
        at that time.
        """
        self._own, self._before = own, before
        self._names = {name.partition(".")[0] for name in sys.modules}
        self._seen = self._look()
        settled = all(state[-1] < (began - SETTLED_S) * 1e9 for state in self._seen[0].values())
        self.certain = settled and self.is_current()

    def is_current(self) -> bool:
        """Whether a process that begins now would import the same."""
        with contextlib.suppress(OSError):
            return self._look() == self._seen and sha256_of(self._own) == self._before
        return False

    def _look(self) -> tuple[dict[str, State], dict[str, list[str]]]:
        """Return the state of each file that was imported, and the names in each folder where modules are looked for.

        A new module there may come before the one that was imported.
        """
        folders = {path: self._importable(path) for path in sys.path if Path(path).is_dir()}
        settings = [f"{path}/{name}" for path, names in folders.items() for name in names if ".pth" in name]
        own = tuple(f"{path}{os.sep}" for path in self._own)
        files = {path for path in (*_imported(), *_mapped(), *settings) if not path.startswith(own)}
        return {path: _state(path) for path in files}, folders

    def _importable(self, folder: str) -> list[str]:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if self._is_importable(entry))

    def _is_importable(self, entry: os.DirEntry[str]) -> bool:
        named = entry.name.endswith(IMPORTABLE) or entry.name in self._names  # the latter: also without `__init__.py`
        return named or Path(entry.path, "__init__.py").exists()


def _imported() -> Iterator[str]:
    """Yield the files of all modules, without waking those that import themselves once they are used."""
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType):
            file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
            if isinstance(file, str):
                yield file


def _mapped() -> Iterator[str]:
    """Yield the files of Python itself and of all libraries."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, access, _, _, _, *path = line.split(maxsplit=5)
        if "x" in access and path and path[0].startswith("/"):
            yield path[0]


def _state(path: str) -> State:
    """Return what changes with a file's content; nobody can set the last, the time of its last change."""
    status = os.stat(path)  # noqa: PTH116  # of thousands of files
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
