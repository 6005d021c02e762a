"""`invoke image.watch`: starts a run's tasks again with changed code, by `docker compose watch`."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import time

from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import AfterStop
from cluster.host.control.watch import print_end
from cluster.host.launch import teardown
from cluster.host.runtime import registry
from cluster.system import interrupts, processes
from cluster.system.errors import RunFailed, UsageError
from cluster.system.files import remove
from cluster.system.json_files import write_json

POLL_S = 0.2
INTERRUPTED_S = 20.0
"""How long Compose may take to end: it finishes replacing a container first."""


def watch(run: RunFolder, *, trust: bool = False) -> None:
    """Start the run's tasks again whenever the code that they run changes here, until the run ends or is stopped.

    The tasks are killed and continue from the newest checkpoint, with the new code, as after any loss of a task.

    Raises:
        UsageError: it is not in progress, or nothing replaces its tasks.
        PrerequisiteError: what builds its image is missing.
        RunFailed: Compose ended by itself.
    """
    if not trust:
        provenance.check(run)
    if not teardown.in_progress(run):
        raise UsageError(f"run {run.name!r} is not in progress; `invoke up --resume {run.name}` continues it")
    command = registry.of(run).watch(run)
    print(
        f"{command}\na change to the code of {run.name} starts its tasks again; Ctrl-C ends this, the run continues",
        flush=True,
    )
    write_json(run.replaced, {"by": "invoke image.watch"})
    try:
        code = _compose(command, run)
    finally:
        remove(run.replaced)
    if run.load_summary():
        print_end(run)
    elif run.stop_requested:
        print(f"{run.name} is being {'scaled' if run.after_stop == AfterStop.SCALE else 'stopped'}", flush=True)
    else:
        raise RunFailed(f"`docker compose watch` ended with exit code {code}, see above; {run.name} continues")


def _compose(command: str, run: RunFolder) -> int:
    compose = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL, process_group=0)
    try:
        while processes.reap(compose) is None and not run.load_summary() and not run.stop_requested:
            time.sleep(POLL_S)
    finally:
        with interrupts.ignored("ending `docker compose watch`"):
            processes.signal_group(compose, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes.wait(compose, INTERRUPTED_S)
            processes.signal_group(compose, signal.SIGKILL)
    return processes.wait(compose)
