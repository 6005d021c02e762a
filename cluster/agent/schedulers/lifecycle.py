"""Continues a run when a scheduler restarts its tasks, and determines the exit code for the scheduler."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.records import OutcomeState
from cluster.system import processes
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIMEOUT, TimedOut
from cluster.system.files import remove
from cluster.system.waiting import wait_until

POLL_S = 0.2
COPY_S = 0.5
"""How often a copy of a task checks for a newer one."""


def run_agent(command: Sequence[str], run: RunFolder, copy: TaskCopy) -> int | None:
    """Run a task's agent until it ends, and forward SIGTERM to it; return its exit code, negative for a signal.

    Returns None if a newer copy of the task has begun elsewhere: the agent was ended, and the run continues without it.
    """
    agent = subprocess.Popen(command, env=os.environ | copy.environment, preexec_fn=processes.die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: None if run.outcome or copy.is_superseded else agent.terminate())
    while not copy.is_superseded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agent.wait(COPY_S)
            return None if copy.is_superseded else code
    agent.kill()
    agent.wait()
    return None


def continue_run(run: RunFolder) -> None:
    """Begin the next generation of a run whose tasks have all ended."""
    run.begin_generation(run.generation + 1, resumed=True)
    for beat in (run.path / "status").glob("*.json"):
        remove(beat)
    run.reopen()


def await_layout(run: RunFolder, timeout_s: float) -> None:
    """Wait until the chief has laid out the run's folder, or opened it again; raise TimedOut after `timeout_s`."""
    if not wait_until(lambda: run.cluster.exists() and not run.has_stopped, timeout_s, POLL_S):
        raise TimedOut(f"{run.path} was not laid out in {timeout_s:g} s; see the log of the chief's container")


def result_code(run: RunFolder) -> int:
    """Return the exit code that tells a controller how the run ended, and whether to restart the task."""
    outcome = run.outcome
    if outcome is None or outcome.state == OutcomeState.STOPPED:
        return EXIT_INTERRUPTED
    if outcome.state == OutcomeState.SUCCEEDED:
        return EXIT_DONE
    code = outcome.exit_code or EXIT_FAILED
    return code if EXIT_FAILED <= code <= EXIT_TIMEOUT else EXIT_FAILED
