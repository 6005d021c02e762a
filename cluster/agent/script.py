"""A user's script as the program of a task.

It knows nothing of gates, heartbeats or our exit codes. So it starts once its cluster is complete, and its agent writes
the heartbeat until the end.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cluster.agent.task_process import TaskProcess
from cluster.contract import settings
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Task
from cluster.system.paths import ROOT

KERAS_HOOK = ROOT / "train" / "patches" / "hook"
"""Holds the `sitecustomize` that patches Keras 3 in a script's process."""


class Script(TaskProcess):
    """A user's script. It has no gate, so it starts once its cluster is complete, in a separate working folder."""

    scripted = True

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, folder: Path) -> None:
        super().__init__(command, environment, log)
        self._folder = folder

    @classmethod
    def create(cls, command: list[str], environment: dict[str, str], run: RunFolder, task: Task) -> Self:
        return cls(command, script_environment(environment), run.log(task.name), run.work(task.name))

    def open_gate(self, variables: dict[str, str]) -> None:
        self._environment |= variables
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start(self._folder)


def script_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a script's environment: modules of this checkout must not shadow those that it imports.

    The folder of the hook that patches Keras has no other module.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and Path(entry).resolve() != ROOT]
    return {**settings.one_core_threads(), **environment, "PYTHONPATH": os.pathsep.join([str(KERAS_HOOK), *kept])}
