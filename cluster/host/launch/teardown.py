"""Ends runs: removes their processes, containers and networks, and finds leftovers."""

import contextlib
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from cluster.contract.results import summary
from cluster.contract.run import claim, owner
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import POLL_S, LivenessMonitor, final_state, is_silent
from cluster.contract.run.records import FINAL_STATES, TaskState
from cluster.contract.spec import Role
from cluster.host.runtime import registry
from cluster.host.runtime.base import Runtime, Shell
from cluster.system import processes
from cluster.system.errors import EXIT_FAILED, ClusterError, PrerequisiteError
from cluster.system.messages import COMMAND
from cluster.system.terminal import outliving_reader, print_lines, print_wait


def in_progress(run: RunFolder) -> bool:
    """Whether the run is still training or starting, even before its first heartbeat."""
    if not run.cluster.exists() or run.load_summary():
        return False
    if owner.read_owner(run) is not None and registry.find_runtime(run).alive(run):
        return True  # even if its tasks write no heartbeats
    return final_state(run) is None and not is_silent(run)


def remove_run(run: RunFolder, sh: Shell, *, grace_s: int = 10, also: Iterable[Runtime] = ()) -> None:
    """End and remove every process, container and network of a run. Its folder stays.

    Only for the holder of the run's claim: otherwise another command may have resumed the run. Containers get `grace_s`
    to end by themselves. `also` are runtimes that are known to have leftovers of the run, whatever its records say.
    """
    _record_outcome(run, "stopped")  # first, so that the run does not seem to continue if this is interrupted
    for runtime in dict.fromkeys([*also, registry.find_runtime(run)]):
        runtime.remove(run, sh, grace_s)
    if owned := owner.read_owner(run):  # any runtime's run has its metrics server on this machine
        processes.kill_all(owned.processes, f"run {run.name}")
    owner.remove_owner(run)


def remove_ended(run: RunFolder, sh: Shell) -> str:
    """Remove the leftovers of a run that has ended; return an error message if some remain, otherwise an empty string.

    Errors must not keep the run's result from being reported. A run that another command has resumed is left alone.
    """
    try:
        _await_evaluation(run)
    except KeyboardInterrupt:
        with outliving_reader():
            print_lines(f"not evaluated: the last checkpoint; next: {COMMAND} evaluate {run.name}", file=sys.stderr)
    try:
        with claim.hold_claim(run, "ended", wait_s=claim.WAIT_S):
            return try_remove(run, sh) if run.summary.exists() else ""
    except claim.Taken:
        return ""
    except (ClusterError, KeyboardInterrupt) as error:
        return _left(run, error)


def _await_evaluation(run: RunFolder) -> None:
    """Wait while the evaluator starts or evaluates the last checkpoint; its agent ends it if that takes too long."""
    monitor, is_announced = LivenessMonitor(run), False
    while owner.read_owner(run) and (beat := monitor.look().get(Role.EVALUATOR.value)):
        if beat.state in (*FINAL_STATES, TaskState.LOST):
            return
        if not is_announced:
            print_wait("the evaluator evaluates the last checkpoint; Ctrl-C ends it")
            is_announced = True
        time.sleep(POLL_S)


def try_remove(run: RunFolder, sh: Shell) -> str:
    """Call `remove_run`; return its error as a message, or an empty string."""
    try:
        remove_run(run, sh)
    except (Exception, KeyboardInterrupt) as error:
        return _left(run, error)
    return ""


def _left(run: RunFolder, error: BaseException) -> str:
    why = " ".join(str(error).split()) or "interrupted"
    return f"not all of {run.name} could be removed; `{COMMAND} down {run.name}` tries again: {why}"


def record_end(run: RunFolder, state: str = "stopped", error: str = "") -> None:
    """Write the summary of a run that was ended before its tasks could write it, for commands that watch it."""
    _record_outcome(run, state, error)
    with contextlib.suppress(Exception):  # a damaged folder must not prevent ending the run
        if run.cluster.exists() and not run.summary.exists():
            summary.write_summary(run, settle_s=0)


def _record_outcome(run: RunFolder, state: str, error: str = "") -> None:
    with contextlib.suppress(Exception):
        if run.cluster.exists() and not run.summary.exists():
            run.end(state, task="user" if state == "stopped" else "", exit_code=EXIT_FAILED, error=error)


def find_leftovers(runs_dir: Path) -> tuple[dict[str, list[Runtime]], dict[str, str]]:
    """Return the runs of a folder that have left a process, container or network, from one query of each runtime.

    Returns:
        The runs that can be ended, by name, with the runtimes that have leftovers of each; and the runs whose runtime
        does not answer, by name, with a description of the runtime and the error.
    """
    recorded = owner.recorded_runs(runs_dir)
    names = {run.name for run in recorded} | {path.parent.name for path in runs_dir.glob("*/compose.json")}
    found: dict[str, list[Runtime]] = {}
    unreachable: dict[str, str] = {}
    for runtime in registry.RUNTIMES.values():
        try:
            for name in runtime.find_leftovers(runs_dir, names):
                found.setdefault(name, []).append(runtime)
        except PrerequisiteError as error:
            why = f"{runtime.tasks}, which may continue: {error}"
            unreachable |= {run.name: why for run in recorded if registry.find_runtime(run) is runtime}
    return dict(sorted(found.items())), unreachable
