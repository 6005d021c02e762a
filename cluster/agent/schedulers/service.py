"""The first process of a Swarm task: runs the task's agent on the host that the Swarm has chosen.

    python -m cluster.agent.schedulers.service [ARGUMENT ...]

The environment has RUN_DIR and TASK; the arguments are the agent's.

A Swarm that loses contact with a host starts its tasks elsewhere, while the old copies may continue. So each copy
records itself in the run folder, and a copy that finds a newer one there ends at once, without a message to the others.

A host that is drained asks its tasks to end. Then every task saves at the same step and exits with code 75, so that the
Swarm restarts it, those of the drained host elsewhere. The chief's agent reopens the run; the others wait for that.
"""

import os
import signal
import sys
from pathlib import Path

from cluster.agent.schedulers import lifecycle
from cluster.contract import settings
from cluster.contract.results import summary
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.records import AfterStop
from cluster.contract.spec import Role
from cluster.system import processes
from cluster.system.errors import EXIT_DONE, EXIT_PEER_LOST, reports_errors

SECRETS = Path("/run/secrets")
"""The folder of a Swarm's secrets: one file for each variable, with its value."""


@reports_errors
def main(words: list[str]) -> int:
    """Run the agent of the task that the environment names; return the container's exit code."""
    run, task = RunFolder(Path(os.environ["RUN_DIR"])), os.environ["TASK"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_PEER_LOST))  # until the agent asks for a checkpoint
    copy = TaskCopy.register(run, task)
    await_reopening(run, task)
    os.environ |= {"STOP_THEN": AfterStop.REQUEUE, **secret_variables(SECRETS)}
    return run_copy([sys.executable, "-m", "cluster.agent", *words], run, copy)


def await_reopening(run: RunFolder, task: str) -> None:
    """Wait until a run that stopped to free a host is reopened, see `lifecycle.await_layout`; the chief reopens it."""
    if not (run.has_stopped and run.after_stop == AfterStop.REQUEUE):
        return
    if task == Role.CHIEF:
        summary.await_last_heartbeats(run, summary.SETTLE_S)
        lifecycle.continue_run(run)
    else:
        lifecycle.await_layout(run, settings.seconds("RENDEZVOUS_TIMEOUT_S"))


def secret_variables(folder: Path) -> dict[str, str]:
    """Return the variables whose values the Swarm keeps as secrets."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*")) if path.is_file()}


def run_copy(command: list[str], run: RunFolder, copy: TaskCopy) -> int:
    """Run the agent to its end, or until another copy of the task has begun; return the container's exit code."""
    if (code := lifecycle.run_agent(command, run, copy)) is None:
        return EXIT_DONE
    if code == EXIT_DONE and run.has_stopped and run.after_stop == AfterStop.REQUEUE:
        return EXIT_PEER_LOST
    return processes.as_exit_code(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
