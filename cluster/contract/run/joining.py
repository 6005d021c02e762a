"""Where the hub of a run listens, and the run's token, which only the run's own user may read."""

import contextlib
import secrets
import socket

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Count, Record
from cluster.contract.spec import Task
from cluster.system.json_files import create_json, write_json
from cluster.system.ports import PORTS, open_listener

TOKEN_BYTES = 32
PRIVATE = 0o600


class Invitation(Record):
    """The address of the hub: `control/gang.json`."""

    host: str
    port: Count


class Token(Record):
    """The secret of the run's agents: `control/token.json`."""

    token: str


def read_invitation(run: RunFolder) -> Invitation | None:
    """Return how to reach the hub; None without a valid record."""
    return records.read_record(run.gang, Invitation.from_json, None, limit=records.TASK_BYTES)


def run_token(run: RunFolder) -> str:
    """Return the secret of the run's agents, which the first of them creates. `RunFolder.reopen` removes it.

    Raises:
        OSError: it cannot be written.
    """
    if not (known := records.read_record(run.token, Token.from_json, None, limit=records.TASK_BYTES)):
        create_json(run.token, {"token": secrets.token_hex(TOKEN_BYTES)}, Token.from_json, mode=PRIVATE)
        known = records.read_record(run.token, Token.from_json)
    return known.token


def generation_token(run: RunFolder, generation: int) -> str:
    """Return the secret of the agents that take part in a generation, see `run_token`."""
    return f"{run_token(run)}/{generation}"


def open_hub_listener(run: RunFolder, task: Task, host: str) -> tuple[socket.socket, str]:
    """Listen at `host` for the other agents, and record where; return the listener and the token.

    The port of an earlier hub of this run is used again if possible: others may see an old record. They reach it at the
    address of the task, the chief.

    Raises:
        OSError: no port is free, or the record cannot be written.
    """
    before = read_invitation(run)
    usual = 0 if task.port in PORTS else hub_port(task.port)
    listener = _listen(host, before.port if before else usual, usual)
    try:
        write_json(run.gang, {"host": task.host, "port": listener.getsockname()[1]})
        return listener, run_token(run)
    except OSError:
        listener.close()
        raise


def hub_port(port: int) -> int:
    """Return the hub's port where each task has a separate address: the next but one after TensorFlow's.

    Between them is the port of the standby processes' TensorFlow servers.
    """
    return port + 2


def _listen(host: str, *ports: int) -> socket.socket:
    """Listen on the first of these ports that is free, or on any."""
    for port in ports:
        with contextlib.suppress(OSError):
            return open_listener(host, port)
    return open_listener(host, 0)
