"""How agents join a run: the address of the hub, the run's token, which only its user may read, and copies of a task.

A scheduler that loses contact with a host starts its tasks elsewhere, while the old copies may continue. The process
that starts a task under such a scheduler records the copy in `control/copies/TASK.json`, a fencing token: the file
names the newest copy. An older copy leaves the run: it claims no record, joins no cluster, and disconnects.
"""

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Count, Record
from cluster.contract.spec import Task
from cluster.system.errors import EXIT_PEER_LOST, ClusterError
from cluster.system.files import make_folder
from cluster.system.json_files import create_json, write_json
from cluster.system.ports import PORTS, open_listener

TOKEN_BYTES = 32
PRIVATE = 0o600
TRIED_PORTS = 100


class Invitation(Record):
    """The address of the hub: `control/gang.json`."""

    host: str
    port: Count


class Token(Record):
    """The secret of the run's agents: `control/token.json`."""

    token: str


def read_invitation(run: RunFolder) -> Invitation | None:
    """Return the hub's address; None without a valid record."""
    return records.read_record(run.gang, Invitation.from_json, None, limit=records.TASK_BYTES)


def run_token(run: RunFolder) -> str:
    """Return the shared secret of the run's agents; the first caller creates it. `RunFolder.reopen` removes it.

    Raises OSError if it cannot be written.
    """
    if not (known := records.read_record(run.token, Token.from_json, None, limit=records.TASK_BYTES)):
        create_json(run.token, {"token": secrets.token_hex(TOKEN_BYTES)}, Token.from_json, mode=PRIVATE)
        known = records.read_record(run.token, Token.from_json)
    return known.token


def generation_token(run: RunFolder, generation: int) -> str:
    """Return the shared secret of a generation's agents, see `run_token`."""
    return f"{run_token(run)}/{generation}"


def open_hub_listener(run: RunFolder, task: Task, host: str) -> tuple[socket.socket, str]:
    """Listen on `host` for the other agents, and record the address; return the listener and the token.

    The port of the run's previous hub is reused if possible, since others may see an old record. They connect to the
    host of `task`, the chief. Raises OSError if no port is free, or the record cannot be written.
    """
    before = read_invitation(run)
    listener = _listen(host, *([before.port] if before else []), *_usual_ports(task))
    try:
        write_json(run.gang, {"host": task.host, "port": listener.getsockname()[1]})
        return listener, run_token(run)
    except OSError:
        listener.close()
        raise


def hub_port(port: int) -> int:
    """Return the hub's port where each task has a separate address: the TensorFlow server's port plus two.

    The port in between is for the TensorFlow servers of standby processes.
    """
    return port + 2


def _usual_ports(task: Task) -> list[int]:
    """Return the ports for the hub of the chief, the preferred one first; none if any will do, as on one machine."""
    if task.port not in PORTS:
        return [hub_port(task.port)]
    if task.host == "127.0.0.1":
        return []
    # A firewall between nodes admits this range; the standby processes have the ports at half its length from here.
    offset = task.port - PORTS.start + len(PORTS) // 4
    return [PORTS[(offset + at) % len(PORTS)] for at in range(TRIED_PORTS)]


def _listen(host: str, *ports: int) -> socket.socket:
    """Listen on the first free one of these ports, or on any free port."""
    for port in ports:
        with contextlib.suppress(OSError):
            return open_listener(host, port)
    return open_listener(host, 0)


COPY = "TASK_COPY"
"""The environment variable of an agent with the name of its task's copy."""


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
    def register(cls, run: RunFolder, task: str) -> Self:
        """Record a new copy of a task as the newest; its agent needs the variables in `environment`."""
        copy = cls(run, task, secrets.token_hex(8))
        make_folder(copy._path.parent)
        write_json(copy._path, {"copy": copy.name})
        return copy

    @classmethod
    def from_environment(cls, run: RunFolder, task: str) -> Self | None:
        """Return the copy to which this process belongs; None if no scheduler can start a task twice."""
        name = os.environ.get(COPY)
        return cls(run, task, name) if name else None

    @property
    def environment(self) -> dict[str, str]:
        return {COPY: self.name}

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
        if self.is_superseded:
            raise Superseded(f"a newer copy of {self.task} has begun on another host; this one ends")
