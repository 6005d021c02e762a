"""The record of a run's processes on this machine, written before any of them starts.

The record is next to the run folders, in `.running/NAME.owner`, where no container can write and where it survives the
deletion of the run folder. It is removed once none of the processes is left. They are recognized in three ways: the
supervisor by its id and start time; its descendants, including daemons, because the kernel makes the supervisor the
parent of orphans; and, if the supervisor was killed, by a random token in their environment.
"""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Process
from cluster.contract.schema import Record, dictionary
from cluster.system import processes
from cluster.system.files import remove
from cluster.system.json_files import read_json, write_json

TOKEN = "TF_CLUSTER_TOKEN"  # noqa: S105  # the variable's name
"""The environment variable of every process of a local run, and of any run's metrics server."""
RECORD = "owner"


def _supervisor(value: Any) -> dict[str, int] | None:
    """Check the supervisor's identity; a damaged one counts as None, since the token also identifies the processes."""
    try:
        return dictionary(Process)(value)
    except ValueError:
        return None


class Owner(Record, kw_only=False):
    """The processes that were started for a run."""

    runtime: str
    """The runtime of the tasks, such as `docker`: a key of `cluster.host.runtime.registry.RUNTIMES`."""
    token: str
    """The value of the variable `TOKEN` in the environment of the processes."""
    supervisor: Annotated[dict[str, int] | None, _supervisor] = None
    """The `processes.identity` of a local run's first process; None before its start."""

    @property
    def alive(self) -> bool:
        return processes.alive(self.supervisor)

    def processes(self, table: processes.ProcessTable) -> list[int]:
        """Return the ids of the run's processes, the supervisor last, since it identifies the others."""
        ids = table.with_environment(TOKEN, self.token)
        if self.supervisor and self.alive:
            top = self.supervisor["pid"]
            return [*sorted((ids | table.descendants(top)) - {top}), top]
        return sorted(ids)


def create_owner(run: RunFolder, runtime: str, token: str = "") -> Owner:
    """Record that the run is about to start; return the record. `token` is that of a process that already waits."""
    owner = Owner(runtime, token or secrets.token_hex(16))
    write_json(run.outside(RECORD), owner.to_json())
    return owner


def record_supervisor(run: RunFolder, owner: Owner, supervisor: dict[str, Any]) -> None:
    """Record the supervisor of the run's processes."""
    write_json(run.outside(RECORD), replace(owner, supervisor=supervisor).to_json())


def read_owner(run: RunFolder) -> Owner | None:
    """Return the record; None if no process of the run is left or the record is damaged."""
    try:
        owner = Owner.from_json(read_json(run.outside(RECORD)))
    except (OSError, ValueError):
        return None
    return owner if owner.token else None


def remove_owner(run: RunFolder) -> None:
    """Remove the record of a run without remaining processes."""
    remove(run.outside(RECORD))


def recorded_runs(runs_dir: Path) -> list[RunFolder]:
    """Return the runs that have a record, whether or not their folders still exist."""
    return [RunFolder(runs_dir / path.stem) for path in sorted((runs_dir / ".running").glob(f"*.{RECORD}"))]
