"""A user's script as the program of a task.

A script does not know about gates, heartbeats or our exit codes. So its agent starts it only once the cluster is
complete, and writes the heartbeat on its behalf until it ends.
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
"""The folder of the `sitecustomize` module that patches Keras 3 in a script's process."""


class Script(TaskProcess):
    """A user's script. It has no gate, so it starts only once the cluster is complete, in a separate working folder."""

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
    """Return a script's environment, in which modules of this checkout cannot shadow the script's imports.

    The only entry added to its path is the folder of the Keras hook, which has no other module.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and Path(entry).resolve() != ROOT]
    return {**settings.one_core_threads(), **environment, "PYTHONPATH": os.pathsep.join([str(KERAS_HOOK), *kept])}
