"""What a run may have running on this machine: recorded before anything is started, where no container can write it.

The record lies beside the run folders, in `.running/NAME.owner`, so it survives a run folder that somebody deletes, and
it is removed once nothing of the run is left. A run's processes are known by three things, of which the first is
enough: the recorded supervisor, by id and start time; what is below it, which includes every daemon that left its own
parent, because the kernel hands orphans to the supervisor; and the random token in the environment of whatever it
started, for what outlives a supervisor that was killed.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.run.folder import RunFolder
from cluster.system import process_table, processes
from cluster.system.files import remove
from cluster.system.json_files import read_json, write_json

TOKEN = "TF_CLUSTER_TOKEN"  # noqa: S105  # the variable's name
"""The environment variable that every process of a local run is started with."""


@dataclass(frozen=True)
class Owner:
    """What was started of a run."""

    runtime: str
    """What runs its tasks, such as `docker`: a key of `cluster.runtime.registry.RUNTIMES`."""
    token: str
    """The value of `TOKEN` in its processes' environment."""
    supervisor: dict[str, int] | None = None
    """The local run's first process, as `processes.identity` tells; None before it is started."""

    @property
    def alive(self) -> bool:
        """Whether the supervisor lives."""
        return processes.alive(self.supervisor)

    def processes(self, table: process_table.ProcessTable) -> list[int]:
        """Return the ids of the run's processes, the supervisor last: what ends before it is still known to be its."""
        found = table.with_environment(TOKEN, self.token)
        if self.supervisor and self.alive:
            top = self.supervisor["pid"]
            return [*sorted((found | table.descendants(top)) - {top}), top]
        return sorted(found)


def record_path(run: RunFolder) -> Path:
    """Return where the run's owner is recorded."""
    return run.path.parent / ".running" / f"{run.name}.owner"


def begin(run: RunFolder, runtime: str) -> Owner:
    """Record that something of the run is about to be started; return the record."""
    owner = Owner(runtime, secrets.token_hex(16))
    write_json(record_path(run), asdict(owner))
    return owner


def record_supervisor(run: RunFolder, owner: Owner, supervisor: dict[str, Any]) -> None:
    """Record the process that looks after the run's processes."""
    write_json(record_path(run), asdict(replace(owner, supervisor=supervisor)))


def read(run: RunFolder) -> Owner | None:
    """Return what was started of the run; None where nothing is left, or the record is damaged."""
    try:
        return _parse(read_json(record_path(run), None))
    except (OSError, ValueError):
        return None


def forget(run: RunFolder) -> None:
    """Remove the record, because nothing of the run is left."""
    remove(record_path(run))


def recorded(runs_dir: Path) -> list[RunFolder]:
    """Return the runs of a folder that have a record, whether or not their own folders still exist."""
    return [RunFolder(runs_dir / path.stem) for path in sorted((runs_dir / ".running").glob("*.owner"))]


def _parse(value: Any) -> Owner | None:
    if not isinstance(value, dict) or not isinstance(value.get("runtime"), str):
        return None
    token, supervisor = value.get("token"), value.get("supervisor")
    if not isinstance(token, str) or not token:
        return None
    numbers = [supervisor.get(key) for key in processes.IDENTITY] if isinstance(supervisor, dict) else []
    known = len(numbers) == 2 and all(isinstance(number, int) for number in numbers)
    return Owner(value["runtime"], token, supervisor if known else None)
