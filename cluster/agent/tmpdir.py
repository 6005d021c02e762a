"""Each task's own folder for temporary files. It survives the task's restarts and is removed when the run ends.

Scripts keep checkpoints there. The name follows from the run's token, so that nobody else on the machine can create it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cluster.contract.run import joining
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Task


def add(environment: Mapping[str, str], run: RunFolder, task: Task) -> dict[str, str]:
    """Create the folder unless it exists, and return the environment with it as TMPDIR."""
    path = _path(run, task)
    path.mkdir(mode=0o700, exist_ok=True)
    return {**environment, "TMPDIR": str(path)}


def remove(run: RunFolder, task: Task) -> None:
    """Remove the folder."""
    shutil.rmtree(_path(run, task), ignore_errors=True)  # it follows no link


def _path(run: RunFolder, task: Task) -> Path:
    digest = hashlib.sha256(joining.token(run).encode()).hexdigest()
    return Path(tempfile.gettempdir(), f"{task.name}-{digest[:12]}")
