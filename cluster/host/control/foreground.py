"""Watches a run from a command: until it trains, ends or has stopped. A run without live tasks is ended."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from cluster.contract import settings
from cluster.contract.results import summary
from cluster.contract.run import claim, membership, owner, records
from cluster.contract.run.folder import LOST_AFTER_S, SCALE_PATIENCE_S, RunFolder
from cluster.contract.run.heartbeat import LivenessMonitor, slow_timeout_s
from cluster.contract.run.records import AfterStop, Summary
from cluster.host.launch import startup, teardown
from cluster.host.launch.plan import Plan
from cluster.host.runtime import mirror, registry, tensorboard
from cluster.host.runtime.base import Shell
from cluster.host.view import interrupts
from cluster.host.view.live import Live
from cluster.host.view.status import ended_lines, read_status
from cluster.system import errors
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, TimedOut
from cluster.system.json_files import write_json
from cluster.system.messages import COMMAND, short_path
from cluster.system.terminal import error_text, outliving_reader, print_lines

POLL_S = 0.2
START_TIMEOUT_S = 90.0
"""Longest time without any heartbeat after a start, once the data and images are there, or with a live supervisor."""
STOP_TIMEOUT_S = 75.0
"""How much longer a stop may take than saving, or than the grace period of scripts; the engine's timeout is shorter."""


def follow(run: RunFolder, on_status: Callable[[dict[str, Any]], None], timeout_s: float = float("inf")) -> Summary:
    """Watch a run until it has a summary; return the summary, or raise TimedOut after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for value in _statuses(run):
        on_status(value)
        if time.monotonic() > deadline:
            raise TimedOut(f"run {run.name} has not ended after {timeout_s:g} s; it continues, see `{COMMAND} status`")
    return records.read_record(run.summary, Summary.from_json)


def _statuses(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the status of a run until it has a summary, and end the run if it has no live task."""
    monitor = LivenessMonitor(run)
    while not run.load_summary():
        yield read_status(run, monitor.look(), with_board=False)
        _notice_silence(run, monitor)
        time.sleep(POLL_S)


def show_until_end(run: RunFolder, timeout_s: float = float("inf")) -> Summary:
    """Show a run until it has a summary, and return the summary."""
    with Live() as live:
        return follow(run, live.show, timeout_s)


def print_end(run: RunFolder) -> None:
    """Print how a run ended."""
    print("\n".join(ended_lines(run)), flush=True)


def until_training(run: RunFolder, on_status: Callable[[dict[str, Any]], None]) -> bool:
    """Watch a run until every task trains; return False if it ended before."""
    under_way = {"training", "saving", "evaluating", "done"}
    for value in _statuses(run):
        on_status(value)
        names = {task.name for task in membership.cluster(run).tasks}  # read again, since the run may be scaled
        all_train = {beat["task"] for beat in value["tasks"] if beat["state"] in under_way} == names
        if all_train and (value["step"] or run.script):  # a script reports no steps
            return True
    return False


def stop(run: RunFolder, by: str, timeout_s: float | None = None) -> Summary:
    """Ask a run to save and stop; return its summary, or raise TimedOut if it does not stop."""
    run.insist_on_stop(by)
    if registry.find_runtime(run).cancel_queued(run):
        teardown.record_end(run)  # no task is there to do it
    timeout_s = stop_timeout_s(run) if timeout_s is None else timeout_s
    told_at = time.monotonic()

    def tell(value: dict[str, Any]) -> None:
        nonlocal told_at
        if time.monotonic() > told_at + STOP_TIMEOUT_S:
            told_at = time.monotonic()
            states = " and ".join(sorted({beat["state"] for beat in value["tasks"]}))
            print_lines(f"{run.name} is still {states}; its agents end a task that does not continue")

    try:
        return follow(run, tell, timeout_s)
    except TimedOut:
        raise TimedOut(f"run {run.name} did not stop in {timeout_s:g} s; `{COMMAND} down` ends it at once") from None


def stop_timeout_s(run: RunFolder) -> float:
    """Return the timeout of a graceful stop, in seconds: agents end a task that takes too long by itself."""
    return STOP_TIMEOUT_S + (settings.seconds("SCRIPT_GRACE_S") if run.script else slow_timeout_s(run))


def up(plan: Plan, sh: Shell, *, began: float) -> int:
    """Start a run and watch it; return the exit code. `began` is the time of the call of `up`."""
    try:
        plan = startup.start_planned(plan, sh, began=began)
        return attend(plan.run, plan.runtime.board, plan.tensorboard_port, plan.request.detach, sh)
    except KeyboardInterrupt:  # after the tasks were started, before `attend` handles it
        _announce_background(plan.run)
        raise


def attend(run: RunFolder, board: str, port: int | None, detach: bool, sh: Shell) -> int:
    """Show a run until it ends or, detached, until it trains; return the exit code."""
    try:
        try:
            with Live(run if run.script else None) as live:
                ended = _watch(run, board, port, detach, sh, live)
        except KeyboardInterrupt:
            run.insist_on_stop("Ctrl-C")  # before any output, which may fail or block
            how = "every script gets a SIGTERM" if run.script else "every task saves at the same step"
            with outliving_reader():
                print_lines(f"stopping: {how}; Ctrl-C again kills")
            ended = stop(run, "Ctrl-C")
    except KeyboardInterrupt:
        ended = kill(run, sh)
    except interrupts.HungUp:
        run.event("chief", "unattended", cause="SIGHUP")
        print_lines(f"the terminal is gone; {_in_background(run)}")
        return errors.EXIT_HUNG_UP
    except BaseException:
        _announce_background(run)
        raise
    if ended is None:
        return EXIT_DONE
    return report_end(run, ended, sh)


def report_end(run: RunFolder, ended: Summary, sh: Shell, headline: str = "") -> int:
    """Remove the leftovers of a run that has ended, and print the result; return the exit code."""
    left = teardown.remove_ended(run, sh)
    if headline:
        print(headline)
    mirror.await_upload(run)
    print_end(run)
    if left:
        print(left, file=sys.stderr)
    return exit_code(ended)


def _watch(run: RunFolder, board: str, port: int | None, detach: bool, sh: Shell, live: Live) -> Summary | None:
    """Show a run until it ends; return its summary, or None if it continues as intended."""

    def show(value: dict[str, Any]) -> None:
        interrupts.raise_if_hung_up()
        live.show(value)

    stops = "stops every script" if run.script else "saves and stops"
    print_lines(f"run folder {short_path(run.path)}", f"Ctrl-C {stops}, a second one kills")
    if until_training(run, show):
        if port == 0:
            write_json(run.board, {"port": 0})
        else:
            if board == tensorboard.CONTAINER:
                live.clear()  # the engine's client prints
            started = _start_tensorboard(run, port, board, sh, show)
            live.clear()
            print_lines(started)
        if detach:
            live.clear()
            what = "every script runs" if run.script else "training"
            print_lines(f"{what} in the background", f"next: {COMMAND} status --watch, {COMMAND} wait, {COMMAND} stop")
            return None
    return follow(run, show)


def _start_tensorboard(
    run: RunFolder, port: int | None, board: str, sh: Shell, on_status: Callable[[dict[str, Any]], None]
) -> str:
    """Start TensorBoard; return a line with its address or the error, despite which the run continues."""
    runs_dir, taken, monitor = run.path.parent, "", LivenessMonitor(run)

    def while_waiting() -> None:
        on_status(read_status(run, monitor.look(), with_board=False))

    if port and (problem := tensorboard.port_problem(runs_dir, port)):
        port, taken = None, f" ({problem})"
    try:
        port = tensorboard.start(runs_dir, port, board, sh, preferred=run.board_port, while_waiting=while_waiting)
        write_json(run.board, {"port": port})
    except Exception as error:
        why = " ".join(str(error).split())
        return f"TensorBoard is not up, and the run continues without it; `{COMMAND} tensorboard` starts it: {why}"
    return f"TensorBoard {tensorboard.address(port)}{taken}"


def kill(run: RunFolder, sh: Shell) -> Summary:
    """End every task immediately; return the summary."""
    with interrupts.ignored("ending every task"):
        run.end("stopped", task="user")  # before the claim, which makes a scaling command release it
        with outliving_reader():
            print("killing every task", flush=True)
        try:
            with claim.hold_claim(run, "ended", wait_s=claim.WAIT_S):
                # `docker compose kill` would fail if an agent had seen the outcome and ended first.
                teardown.remove_run(run, sh, grace_s=0)
        finally:
            teardown.record_end(run)  # no agent is left to write the summary
    return records.read_record(run.summary, Summary.from_json)


def _announce_background(run: RunFolder) -> None:
    """Print that a run continues although this command no longer watches it; the error is reported separately."""
    with contextlib.suppress(Exception):
        if teardown.in_progress(run):
            print(error_text(_in_background(run)), file=sys.stderr, flush=True)


def _in_background(run: RunFolder) -> str:
    return f"{run.name} continues in the background; next: {COMMAND} status --watch, {COMMAND} stop, {COMMAND} down"


def exit_code(ended: Summary) -> int:
    """Return the exit code for the summary of a run."""
    if failure := ended.failure:
        code = failure.exit_code
        # Never EXIT_USAGE: the run was started.
        return code if code in (errors.EXIT_PREREQUISITE, errors.EXIT_TIMEOUT) else EXIT_FAILED
    return errors.EXIT_INTERRUPTED if ended.state == "stopped" else EXIT_DONE


def _notice_silence(run: RunFolder, monitor: LivenessMonitor) -> None:
    """End a run that has no live task, by this watcher's clock: its engine stopped, or everything was killed."""
    if monitor.silence_s <= LOST_AFTER_S:
        return
    # While the supervisor imports for all tasks, it may be too busy to write their heartbeats for a long time.
    owned = owner.read_owner(run)
    starting = not run.outcome and (not monitor.begun or (owned is not None and owned.alive))
    runtime = registry.find_runtime(run)
    patience_s = START_TIMEOUT_S if starting and not runtime.is_remote else LOST_AFTER_S  # or ask the scheduler
    if claim.is_scaling(run):
        patience_s = SCALE_PATIENCE_S
    if monitor.silence_s <= patience_s or (runtime.is_remote and runtime.alive(run)):
        return
    cause = runtime.scheduler_status(run) or "no task writes heartbeats: the engine or the supervisor stopped"
    if run.continues_elsewhere and run.after_stop == AfterStop.SCALE:
        cause = f"every task saved and ended to be scaled, but `{COMMAND} scale` ended before it started them again"
        write_json(run.control / "outcome.json", {"state": "failed", "time": time.time(), "error": cause})
    if run.end("failed", error=cause, exit_code=EXIT_FAILED) or run.outcome:
        summary.write_summary(run, settle_s=0)
