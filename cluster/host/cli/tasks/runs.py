"""The tasks that start, show and end runs, one at a time or in a sweep."""

import time

from cluster.contract import spec
from cluster.host import sweep as sweeping
from cluster.host.cli.command_line import parse_options, shell, show, takes_request, task
from cluster.host.control import ending, scaling
from cluster.host.control import foreground as watching
from cluster.host.control import profile as tracing
from cluster.host.launch import folders, startup, teardown
from cluster.host.options.request import OPTIONS
from cluster.host.runtime import tensorboard as board
from cluster.host.view.live import print_logs
from cluster.host.view.status import read_status, status_table
from cluster.system.errors import RunFailed, UsageError
from cluster.system.messages import COMMAND
from cluster.system.terminal import print_lines


@task()
def status(c, run=None, watch=False, json=False):
    """Show every task's state, step, speed, loss and restarts."""
    folder = folders.find_run(run)
    if watch:
        watching.show_until_end(folder)
    show(read_status(folder), status_table, as_json=json)


@task()
def logs(c, task=None, run="", follow=False, tail="", since=""):
    """Show what the tasks' programs printed."""
    last = spec.parse_count("tail", tail, 0, 10**9) if tail else None
    begin = time.time() - spec.parse_age(since, "since") if since else None
    folder = folders.find_run(run)
    cluster = folder.load_cluster()
    names = [cluster.task(task).name] if task else [member.name for member in cluster.tasks]
    print_logs(folder, names, follow=follow, last=last, since=begin)


@task()
def profile(c, task=None, steps="5", run=""):
    """Trace some steps of a task while it trains, to be read in TensorBoard's Profile tab."""
    if not task:
        raise UsageError(f"the task is missing: name one that trains, such as {COMMAND} profile worker-0")
    print("\n".join(tracing.trace_task(folders.find_run(run), task, spec.parse_count("steps", steps, 1, 10_000))))


@task(port=board.PORT)
def tensorboard(c, port=board.AUTO, runtime="auto"):
    """Start TensorBoard over all runs, unless it runs, and print its address."""
    number = None if port == board.AUTO else spec.parse_count("port", port, 1, 65535)
    print(board.address(startup.start_tensorboard(number, runtime, shell(c))))


@task()
def wait(c, run=None, timeout=""):
    """Wait for a run to end and show how; exit code 0 done, 1 failed, 4 timed out, 130 stopped."""
    folder = folders.find_run(run)
    bound = spec.parse_count("timeout", timeout, 1, 10**9) if timeout else float("inf")
    ended = watching.show_until_end(folder, bound)
    watching.print_end(folder)
    return watching.exit_code(ended)


@task(workers=OPTIONS["workers"].help)
def scale(c, workers="", ps="", run="", trust=False):
    """Continue with more or fewer workers: save at the same step on every task, then train on from there."""
    counts = parse_options(workers=workers, ps=ps)
    return scaling.scale_run(folders.find_run(run), shell(c), trust=trust, **counts)


@task()
def stop(c, run=None):
    """Save a checkpoint at the same step on every task and stop; `up --resume` continues."""
    folder = folders.find_run(run)
    if not folder.load_summary():
        print_lines(f"stopping {folder.name}")
    watching.stop(folder, f"{COMMAND} stop")
    left = teardown.remove_ended(folder, shell(c))
    watching.print_end(folder)
    if left:
        raise RunFailed(left)


@task()
def down(c, run=None, all=False, timeout="15"):
    """End every process, container and network that `up` started. Run folders stay."""
    if run and all:
        raise UsageError(f"down {run} --all: name a run, or take every run down")
    bound = spec.parse_count("timeout", timeout, 0, 10**9)
    return ending.take_down(folders.runs_dir(), run, bound, shell(c))


@takes_request("fresh", "detach", "trust", file_first=True)
def sweep(c, request, over=None, parallel="1", halving="0"):
    """Train once with every combination of values, and list the runs, the best first; --resume continues a sweep."""
    at_a_time = spec.parse_count("parallel", parallel, 1, sweeping.MAX_PARALLEL)
    first_rung = spec.parse_count("halving", halving, 0, 10**9)
    if request.resume:
        if over:
            raise UsageError(f"--resume {request.resume}: a sweep continues with its own values; leave --over out")
        planned = sweeping.load_sweep(request.resume)
    else:
        planned = sweeping.plan_sweep(request, over or (), first_rung)
    return sweeping.run_sweep(planned, at_a_time)
