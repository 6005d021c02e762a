"""`up --debug TASK`: the program of one task waits for a debugger, and its waiting does not count as a failure."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.contract.spec import ClusterSpec, parse_count
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.ports import bind_error

PORT = 5678
"""As in .vscode/launch.json."""
LOOPBACK = "127.0.0.1"
MOUNT = "/debugger"
"""Where containers see the folder that holds debugpy."""
LISTEN, PACKAGES = "DEBUGPY_LISTEN", "DEBUGPY_PACKAGES"
"""What train/startup/debugger.py reads: the address, and the folder to import debugpy from."""


@dataclass(frozen=True)
class Debugger:
    """The task that waits, and the port of 127.0.0.1 at which it does."""

    task: str
    port: int
    package: Path
    """The folder of debugpy."""

    @property
    def note(self) -> str:
        """What the caller should know of it."""
        return (
            f"{self.task} waits for a debugger on {LOOPBACK}:{self.port} before it trains; hang detection is off, and "
            "any user of this machine can attach"
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the task as a process of this machine."""
        return {LISTEN: f"{LOOPBACK}:{self.port}"}

    @property
    def contained_environment(self) -> dict[str, str]:
        """The variables of the task in a container, which publishes the port."""
        return {LISTEN: f"0.0.0.0:{self.port}", PACKAGES: MOUNT}


def parse_debugger(requested: str, cluster: ClusterSpec) -> Debugger | None:
    """Parse `--debug TASK` or `--debug TASK:PORT`; None where nothing is requested."""
    if not requested:
        return None
    name, _, text = requested.partition(":")
    task, port = cluster.task(name), parse_count("debug", text or PORT, 1024, 65535)
    found = importlib.util.find_spec("debugpy")
    if found is None or found.origin is None:
        raise PrerequisiteError(f"--debug {name}: debugpy is missing: {sys.executable} -m pip install debugpy")
    if error := bind_error(port):
        raise PrerequisiteError(
            f"--debug: port {LOOPBACK}:{port} is in use ({error.strerror}); end what listens there, or choose another "
            f"one, such as --debug worker-0:{port + 1 if port < 65535 else PORT}"
        )
    return Debugger(task.name, port, Path(found.origin).parent)


def check_reachable(debugger: Debugger | None, *, remote: str, private: bool, detached: bool) -> None:
    """Check that a debugger on this machine reaches the task, and that the command lets it wait."""
    if debugger is None:
        return
    if remote:
        raise UsageError(
            f"--debug {debugger.task} with {remote}, which are out of a debugger's reach; use --runtime local or docker"
        )
    if private:
        raise UsageError(f"--debug {debugger.task} with --network private, which no debugger reaches: leave it out")
    if detached:
        raise UsageError(
            f"--debug {debugger.task} with --detach, which waits until every task trains: leave one of them out"
        )
