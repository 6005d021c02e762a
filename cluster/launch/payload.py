"""What a run's tasks bring along beside this checkout's own code: a script, folders of modules, extra packages.

Local processes use these where they lie; containers have them mounted, read-only.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import settings
from cluster.errors import PrerequisiteError, UsageError
from cluster.run.folder import RunFolder
from cluster.runtime import inherited
from cluster.spec import ClusterSpec
from cluster.system.files import make_folder

SCRIPT_MOUNT = "/script"
CODE_MOUNT = "/code"
PACKAGES_MOUNT = "/packages"
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


@dataclass(frozen=True)
class Payload:
    """What the tasks bring along; nothing of it for the built-in trainer with a preset of ours."""

    script: Path | None = None
    arguments: tuple[str, ...] = ()
    code_dirs: tuple[Path, ...] = ()
    requirements: Path | None = None
    packages: Path | None = None
    """The folder with what `requirements` asks for."""
    separate_chief: bool = False
    """Whether the script's TF_CONFIG has a chief beside the workers, and not workers alone, as most scripts expect."""
    env: tuple[str, ...] = ()
    """`--env` as typed: variables that the tasks get besides."""

    def command(self, *, contained: bool) -> list[str]:
        """Return what the agent is told to run; nothing for the built-in trainer."""
        if self.script is None:
            return []
        script = f"{SCRIPT_MOUNT}/{self.script.name}" if contained else str(self.script)
        return ["--script", script, *self.arguments]

    def environment(self, spec: ClusterSpec, *, contained: bool) -> dict[str, str | None]:
        """Return the variables that the tasks get for it; None is the value that the caller has."""
        found = inherited.for_container(way_out=self.script is not None) if contained else {}
        found |= inherited.parse(self.env)
        path = [*(target for _, target in self.mounts() if target != SCRIPT_MOUNT)] if contained else self.local_path()
        if path:
            found["PYTHONPATH"] = os.pathsep.join(path)
        if self.script is None:
            return found
        found["PYTHONUNBUFFERED"] = "1"
        if self.needs_legacy_keras(spec):
            found[LEGACY_KERAS] = "1"
        return found

    def local_path(self) -> list[str]:
        """Return PYTHONPATH for processes of this machine; empty where the caller's own serves."""
        if not self.code_dirs and not self.packages:
            return []
        own = [*map(str, self.code_dirs), *([str(self.packages)] if self.packages else [])]
        return list(dict.fromkeys([*own, *inherited.python_path()]))

    def mounts(self) -> list[tuple[Path, str]]:
        """Return each folder that containers see, and where."""
        found = [(folder, f"{CODE_MOUNT}/{at}") for at, folder in enumerate(self.code_dirs)]
        if self.packages:
            found.append((self.packages, PACKAGES_MOUNT))
        if self.script:
            found.append((self.script.parent, SCRIPT_MOUNT))
        return found

    def needs_legacy_keras(self, spec: ClusterSpec) -> bool:
        """Whether tf.keras must be Keras 2: Keras 3's own `fit` fails on more than one task."""
        chosen = LEGACY_KERAS in os.environ or LEGACY_KERAS in inherited.parse(self.env)
        return self.script is not None and bool(spec.members) and not chosen

    def to_json(self) -> dict[str, Any]:
        """Return the form that is saved as the `config.json` of a script's run."""
        return {
            "script": str(self.script),
            "arguments": list(self.arguments),
            "separate_chief": self.separate_chief,
        }


def check_path(option: str, name: str) -> None:
    """Check that a path can be one.

    Raises:
        UsageError: it cannot be told to the system, or not told in one line.
    """
    if not name.isprintable():
        raise UsageError(f"--{option} {name!r}: a path without control characters is expected; rename that file")


def check_script(name: str, runs_dir: Path) -> Path:
    """Return the script's path.

    Raises:
        UsageError: there is no such file, it cannot be read, or its folder cannot be shared with the tasks.
    """
    check_path("script", name)
    script = settings.expanded("script", name).resolve()
    if not script.is_file() or not os.access(script, os.R_OK):
        what = "is a folder" if script.is_dir() else "cannot be read" if script.exists() else "does not exist"
        raise UsageError(f"--script {name!r} {what}: expected a Python file that reads TF_CONFIG; name one")
    folder = script.parent
    shared = {Path("/"): "the root of the file system"}
    if home := settings.home():
        shared[home.resolve()] = "your home folder"
    if folder in shared:
        raise UsageError(
            f"--script {name!r} lies in {shared[folder]}, and tasks see all of the folder that a script lies in; "
            "move it to a folder of its own"
        )
    if folder.is_relative_to(runs_dir.resolve()):
        raise UsageError(
            f"--script {name!r} lies in the folder of the runs, {runs_dir}; copy it to a folder of its own"
        )
    return script


def check_readable(payload: Payload, user: str) -> None:
    """Check that containers can read what is mounted: where root starts them they run as another user.

    Raises:
        PrerequisiteError: they cannot.
    """
    if os.getuid() != 0:
        return
    files = [(payload.script, stat.S_IROTH)] if payload.script else []
    for path, bits in [*files, *((folder, stat.S_IROTH | stat.S_IXOTH) for folder, _ in payload.mounts())]:
        if path == payload.packages:
            continue  # perhaps not installed yet, and readable whatever the umask
        if path.stat().st_mode & bits != bits:
            raise PrerequisiteError(
                f"containers run as user {user}, who cannot read {path}: `chmod -R o+rX {shlex.quote(str(path))}`, "
                "or use --runtime local"
            )


def lay_out(payload: Payload, run: RunFolder, spec: ClusterSpec, *, contained: bool) -> None:
    """Give every task a folder to run the script in: `work/TASK`, with a link to each entry of the script's folder.

    So what the script reads beside itself is found, and what it writes lands in the run's folder. What an earlier life
    of the run wrote there stays.
    """
    if payload.script is None:
        return
    folder = payload.script.parent
    seen_at = Path(SCRIPT_MOUNT) if contained else folder
    if contained:
        run.scratch.mkdir(parents=True, exist_ok=True)
    for task in spec.tasks:
        work = run.work(task.name)
        make_folder(work)  # not through a link that the script of an earlier life left
        for name in _entries(folder, run.path.resolve()):
            link = work / name
            if link.is_symlink():
                link.unlink()
            if not link.exists():
                link.symlink_to(seen_at / name)


def _entries(folder: Path, run: Path) -> Iterator[str]:
    """Yield the names to link to: all but the one that holds the run, in which a walk would go round for ever."""
    for entry in folder.iterdir():
        if not run.is_relative_to(os.path.realpath(entry)):
            yield entry.name
