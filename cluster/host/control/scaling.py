"""`invoke scale`: stops a run and continues it with another number of workers or parameter servers.

The stop request records that the run is being scaled (`control/stop.json`). So the chief's agent writes no summary, and
watchers wait for the next generation, which this module begins. If the command is killed, the kernel releases its claim
on the run, and the run counts as stopped.
"""

import contextlib
import time

from cluster.contract import spec
from cluster.contract.results import summary
from cluster.contract.run import claim, membership, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import AfterStop
from cluster.contract.schema import Record, dictionary
from cluster.contract.spec import ClusterSpec, Role
from cluster.host.control import foreground
from cluster.host.launch import planning, startup, teardown
from cluster.host.launch.folders import data_dir
from cluster.host.launch.plan import Plan
from cluster.host.launch.resuming import inherit_topology
from cluster.host.options.request import Request
from cluster.host.runtime.base import Shell
from cluster.host.view.live import Live
from cluster.system.errors import EXIT_DONE, TimedOut, UsageError
from cluster.system.messages import COMMAND, counted, either
from cluster.system.terminal import print_lines
from cluster.system.waiting import wait_until

SHOWN_COUNTS = 3


def scale_run(
    run: RunFolder, sh: Shell, *, workers: int | None = None, ps: int | None = None, trust: bool = False
) -> int:
    """Scale a run; return the exit code once every task trains again, or the run has ended instead.

    None for `workers` or `ps` keeps the current number. `trust` accepts records that have changed since this user
    started the run. A run that cannot be scaled, or that does not stop in time, continues with its current size.

    Raises:
        UsageError: the run cannot be scaled to that size, and continues undisturbed.
        PrerequisiteError: this machine lacks the resources; the run continues undisturbed.
        TimedOut: the run did not stop, and continues with its current size.
    """
    before = membership.cluster(run)
    with claim.hold_claim(run, "scaled"):
        planned = plan_scaling(run, workers, ps, trust=trust)
        startup.check_machine(planned, ending=len(before.tasks))
        planned.runtime.prepare(planned, sh, renew=False)
        print_lines(f"{run.name}: every task saves at the same step and ends, then it continues")
        began = time.monotonic()
        stopped = stop_for_scaling(run)
        step, done = max(run.saved_steps, default=0), run.newest_step
        swapped = stopped and _swap(planned, sh)
    if not swapped:
        return foreground.report_end(run, foreground.show_until_end(run), sh, f"{run.name} ended before it was scaled")
    after = planned.cluster
    counts = {"workers_before": _workers(before), "ps_before": len(before.of(Role.PS))}
    counts |= {"workers_after": _workers(after), "ps_after": len(after.of(Role.PS))}
    run.event("chief", "scaled", step=step, **counts)
    reached = f"step {step}"
    if done > step:  # an evaluator reports only steps that were saved
        reached += f" ({counted(done - step, 'step')} done again: a task ended before all had saved)"
    scaled = f"scaled from {_size(before)} to {_size(after)} at {reached}"
    with Live() as live:
        trains = foreground.until_training(run, live.show)
    if not trains:
        headline = f"{run.name} was {scaled}, and ended before every task trained again"
        return foreground.report_end(run, foreground.show_until_end(run), sh, headline)
    print_lines(f"{scaled}; every task trains again after {time.monotonic() - began:.1f} s")
    return EXIT_DONE


def plan_scaling(run: RunFolder, workers: int | None, ps: int | None = None, *, trust: bool = False) -> Plan:
    """Check that a run can be scaled, and return the plan of the new size. Changes nothing."""
    given = {"workers": workers, "ps": ps}
    options = "".join(f" --{name} {count}" for name, count in given.items() if count is not None)
    if not options:
        raise UsageError("--workers is missing: say how many, such as --workers 1")
    if run.script:
        commands = f"`{COMMAND} stop {run.name}`, then `{COMMAND} up --resume {run.name}{options}`"
        raise UsageError(f"run {run.name!r} runs a script, which keeps its own state; {commands}")
    if not teardown.in_progress(run):
        raise UsageError(f"run {run.name!r} has ended; `{COMMAND} up --resume {run.name}{options}` continues it")
    previous = run.load_cluster()
    if previous.kind.staged:
        commands = f"`{COMMAND} stop {run.name}`, then `{COMMAND} up --resume {run.name} --stages N` cuts it again"
        raise UsageError(f"run {run.name!r} is a pipeline, cut into {previous.stages} stages; {commands}")
    runtime = run.load_started().runtime or "auto"
    requested = Request(resume=run.name, workers=workers, ps=ps, runtime=runtime, tensorboard_port="0", trust=trust)
    _check_size(run, membership.cluster(run), planning.build_cluster(inherit_topology(requested, previous)))
    _check_data(run)
    return planning.plan(requested, stops_first=True)


def stop_for_scaling(run: RunFolder) -> bool:
    """Make every task save and end; return False if the run has finished instead. After an error it continues."""
    requested = run.request_stop(f"{COMMAND} scale", then=AfterStop.SCALE)
    if not requested and run.after_stop != AfterStop.SCALE:  # a request to scale is that of a killed command
        raise UsageError(f"run {run.name!r} is being stopped already; `{COMMAND} status --watch` shows it")
    try:
        if not wait_until(lambda: run.outcome, timeout_s := foreground.stop_timeout_s(run), foreground.POLL_S):
            then = f"it continues as it was once its tasks have saved, see `{COMMAND} status --watch`"
            raise TimedOut(f"run {run.name} did not stop in {timeout_s:g} s to be scaled; {then}")
    except BaseException:
        run.withdraw_stop()
        raise
    return run.continues_elsewhere


def _swap(planned: Plan, sh: Shell) -> bool:
    """Remove the cluster that has ended and start the planned one; return False if the run was ended instead."""
    run = planned.run
    try:
        summary.await_last_heartbeats(run, summary.SETTLE_S)
        teardown.remove_run(run, sh)
        if run.continues_elsewhere:
            startup.continue_run(planned, sh)
            return True
    except BaseException:
        with contextlib.suppress(Exception):  # for commands that watch the run; the original error is reported
            run.end("stopped", task="chief")
            summary.write_summary(run, settle_s=0)
            resume = f"{COMMAND} up --resume {run.name}"
            print_lines(f"{run.name} is stopped; `{resume}` continues from its newest checkpoint")
        raise
    if not run.load_summary():  # another command stopped the run for good, and no agent was left to record it
        summary.write_summary(run, settle_s=0)
    return False


def _check_size(run: RunFolder, previous: ClusterSpec, requested: ClusterSpec) -> None:
    if previous.kind.hardware:
        hardware = previous.kind.hardware.upper()
        raise UsageError(f"run {run.name!r} trains on the cores of a {hardware}, whose number is fixed")
    if [task.name for task in requested.tasks] == [task.name for task in previous.tasks]:
        raise UsageError(f"run {run.name!r} has {_size(previous)} already")
    config = run.load_config()
    batch = config.get("global_batch", 0)  # unchanged, so the new size must divide it
    if config.get("bitwise_elastic", 0) or batch % requested.batch_divisor == 0:
        return  # planning checks whether replicas can share virtual shards
    counts = range(spec.MAX_TASKS + 1)
    fitting = [n for n in counts if batch % ((1 + n) * requested.devices) == 0 and n != _workers(previous)]
    near = [str(n) for n in sorted(sorted(fitting, key=lambda n: abs(n - _workers(requested)))[:SHOWN_COUNTS])]
    use = f"use {either(near)} workers" if near else "no other number fits"
    replicas = counted(requested.batch_divisor, "replica")
    raise UsageError(f"--workers {_workers(requested)}: global batch {batch} is not divisible by {replicas}; {use}")


def _check_data(run: RunFolder) -> None:
    version = records.read_record(run.data_version, dictionary(Record), {}).get("version")
    if version and not any(data_dir().glob(f"*/*-{version}*")):
        raise UsageError(f"the data of run {run.name!r} is not in {data_dir()}; set DATA_DIR as when the run began")


def _workers(cluster: ClusterSpec) -> int:
    return len(cluster.of(Role.WORKER))


def _size(cluster: ClusterSpec) -> str:
    servers = len(cluster.of(Role.PS))
    return counted(_workers(cluster), "worker") + (f" and {counted(servers, 'parameter server')}" if servers else "")
