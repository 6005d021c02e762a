"""Copies of a task: a scheduler that loses contact with a host starts its tasks elsewhere, while the old may continue.

The process that starts a task under such a scheduler records the copy in `control/copies/TASK.json`, a fencing token:
the file names the newest copy. An older copy leaves the run: it claims no record, joins no cluster, and disconnects.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Record
from cluster.system.errors import EXIT_PEER_LOST, ClusterError
from cluster.system.files import make_folder
from cluster.system.json_files import write_json

VARIABLE = "TASK_COPY"


class Superseded(ClusterError):
    """A newer copy of the task has begun elsewhere."""

    exit_code = EXIT_PEER_LOST


class _Newest(Record):
    copy: str


@dataclass(frozen=True)
class TaskCopy:
    """One copy of a task."""

    run: RunFolder
    task: str
    name: str

    @classmethod
    def register(cls, run: RunFolder, task: str) -> TaskCopy:
        """Record a new copy of a task as the newest; its agent needs the variables in `environment`."""
        copy = cls(run, task, secrets.token_hex(8))
        make_folder(copy._path.parent)
        write_json(copy._path, {"copy": copy.name})
        return copy

    @classmethod
    def from_environment(cls, run: RunFolder, task: str) -> TaskCopy | None:
        """Return the copy to which this process belongs; None if no scheduler can start a task twice."""
        name = os.environ.get(VARIABLE)
        return cls(run, task, name) if name else None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of this copy's agent."""
        return {VARIABLE: self.name}

    @property
    def _path(self) -> Path:
        return self.run.control / "copies" / f"{self.task}.json"

    @property
    def is_superseded(self) -> bool:
        """Whether a newer copy is recorded; False if the record cannot be read."""
        with contextlib.suppress(OSError):
            newest = records.read_record(self._path, _Newest.from_json, None)
            return newest is not None and newest.copy != self.name
        return False

    def require_newest(self) -> None:
        """Raise `Superseded` unless this copy is the newest."""
        if self.is_superseded:
            raise Superseded(f"a newer copy of {self.task} has begun on another host; this one ends")
