"""Which files the user of the containers may read and write, where root starts them: they never run as root."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from cluster.host.runtime.compose.overlay import UNPRIVILEGED
from cluster.host.runtime.payload import Payload
from cluster.system import files
from cluster.system.errors import PrerequisiteError


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
        if path in payload.secrets.values():
            _check_secret(path, user)
            continue
        if path.stat().st_mode & bits != bits:
            raise PrerequisiteError(
                f"containers run as user {user}, who cannot read {path}: `chmod -R o+rX {shlex.quote(str(path))}`, "
                "or use --runtime local"
            )


def _check_secret(path: Path, user: str) -> None:
    """Check that containers can read a secret's file, which need not be readable to others."""
    found = path.stat()
    if not found.st_mode & (stat.S_IRUSR if found.st_uid == UNPRIVILEGED else stat.S_IROTH):
        raise PrerequisiteError(
            f"containers run as user {user}, who cannot read {path}: `chown {UNPRIVILEGED} {shlex.quote(str(path))}`, "
            "or use --runtime local"
        )


def let_tasks_read(runs_dir: Path, data_dir: Path) -> None:
    """Make what root prepared readable for the containers' user, perhaps under another umask."""
    if os.getuid() != 0:
        return
    runs_dir.chmod(runs_dir.stat().st_mode | 0o055)  # TensorBoard reads all runs as that user
    if not data_dir.exists():
        return
    if (mode := data_dir.stat().st_mode) & 0o055 != 0o055:
        data_dir.chmod(mode | 0o055)
    for folder in ("arrays", "shards"):
        files.make_readable(data_dir / folder)


def give_to_tasks(folder: Path) -> None:
    """Make the containers' user the owner of a folder, where root starts them; never what a link in them names."""
    if os.getuid() != 0:
        return
    for _, inside, others, descriptor in os.fwalk(folder):
        for name in (".", *inside, *others):
            os.chown(name, UNPRIVILEGED, UNPRIVILEGED, dir_fd=descriptor, follow_symlinks=False)
