"""The imported files and inherited properties of this process, to detect whether a new process would differ."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.contract.kept_results import State, imported, is_module, state_of

INHERITED = (
    *("Umask:", "Uid:", "Gid:", "Groups:", "SigBlk:", "SigIgn:", "Cap", "NoNewPrivs:", "Seccomp:"),
    *("Cpus_allowed:", "Mems_allowed:"),
)
"""The fields of `/proc/self/status` that a process inherits from its parent."""
OF_LIBC = 1 << 31 | 1 << 32
"""Signals 32 and 33, which glibc reserves and `posix_spawn` ignores in a new process, as a mask."""
SETTINGS = (".pth", ".egg-link")
"""Suffixes of files in a folder of `sys.path` that change this path."""
SETTLED_S = 2.0
"""The coarsest timestamps of any file system. A file that changed later could change again with the same `state_of`."""


def circumstances() -> list[str]:
    """Describe the inherited properties of this process, except its environment, and its version of Python."""
    proc = Path("/proc/self")
    lines = [line for line in (proc / "status").read_text().splitlines() if line.startswith(INHERITED)]
    lines = [f"{int(line[7:], 16) & ~OF_LIBC:x}" if line.startswith("SigIgn:") else line for line in lines]
    texts = [(proc / name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    spaces = [str(path.readlink()) for path in sorted((proc / "ns").iterdir()) if "_for_" not in path.name]
    schedule = [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)]
    return [*lines, *texts, *spaces, str(schedule), os.path.realpath(sys.executable), sys.version]


def sha256_of(paths: Sequence[Path]) -> str:
    """Return the sha256, in hexadecimal, of the names and contents of files and of all files below folders."""
    digest = hashlib.sha256()
    for path in paths:
        below = [f"{parent}/{name}" for parent, _, names in os.walk(path) for name in names]
        for file in sorted(each for each in below or [str(path)] if "/__pycache__/" not in each):
            with contextlib.suppress(FileNotFoundError), open(file, "rb") as content:  # noqa: PTH123
                digest.update(f"{file}\0{hashlib.sha256(content.read()).hexdigest()}\0".encode())
    return digest.hexdigest()


class Loaded:
    """The state of the files that this process has imported."""

    def __init__(self, own: Sequence[Path], before: str, began: float) -> None:
        """Record the state of the imports since `began`, in seconds since the epoch.

        Files below `own` are compared by content, any others by their metadata; `before` is the `sha256_of(own)` at
        that time.
        """
        self._own, self._before = own, before
        self._names = {name.partition(".")[0] for name in sys.modules}
        below = tuple(f"{path}/" for path in own)
        self._files = [path for path in {*imported(), *_mapped()} if not path.startswith(below)]
        self._seen = self._look()
        settled = all(state[-1] < (began - SETTLED_S) * 1e9 for state in self._seen.values() if state)
        self.certain = settled and self.is_current()
        """Whether the state is that of the import: no file has changed shortly before it, or since."""

    def is_current(self) -> bool:
        """Whether a new process would import the same files."""
        return self._look() == self._seen and sha256_of(self._own) == self._before

    def _look(self) -> dict[str, State]:
        """Return the state of each imported file, and of the entries in `sys.path` that decide which modules are found.

        A new entry may take precedence over an imported module.
        """
        found = {path: state_of(path) for path in self._files}
        for folder in sys.path:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SETTINGS):
                        found[entry.path] = state_of(entry.path)
                    elif entry.name in self._names or is_module(entry.path):
                        found.setdefault(entry.path, ())
        return found


def _mapped() -> Iterator[str]:
    """Yield the executable and the libraries that are mapped into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, access, _, _, _, *path = line.split(maxsplit=5)
        if "x" in access and path and path[0].startswith("/"):
            yield path[0]
