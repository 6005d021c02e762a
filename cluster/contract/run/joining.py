"""The address of a run's hub, and the run's token, which only the run's user may read."""

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
    host of `task`, the chief.

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
    """Return the hub's port where each task has a separate address: the TensorFlow server's port plus two.

    The port in between is for the TensorFlow servers of standby processes.
    """
    return port + 2


def _listen(host: str, *ports: int) -> socket.socket:
    """Listen on the first free one of these ports, or on any free port."""
    for port in ports:
        with contextlib.suppress(OSError):
            return open_listener(host, port)
    return open_listener(host, 0)
