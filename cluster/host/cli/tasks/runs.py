"""The tasks about runs: to show, end, compare and delete them, to use what they have saved, and sweeps."""

import contextlib
import os
import shlex
import sys
import time
from pathlib import Path

from cluster.contract import settings, spec
from cluster.contract.run import provenance
from cluster.host import sweep as sweeping
from cluster.host.cli.command_line import ask_user, parse_options, shell, show, takes_request, task
from cluster.host.control import ending, scaling
from cluster.host.control import foreground as watching
from cluster.host.control import profile as tracing
from cluster.host.launch import folders, startup, teardown, user_files
from cluster.host.options.request import OPTIONS
from cluster.host.reports import listing, page
from cluster.host.runtime import registry
from cluster.host.runtime import tensorboard as board
from cluster.host.runtime.payload import parse_secrets, python_path, recorded_variables, with_variables
from cluster.host.view.columns import columns
from cluster.host.view.live import print_logs
from cluster.host.view.status import read_status, status_table
from cluster.system import files
from cluster.system.errors import RunFailed, UsageError
from cluster.system.messages import COMMAND, counted, either, short_path, size
from cluster.system.terminal import print_lines, print_wait


@task()
def status(c, run=None, watch=False, json=False):
    """Show every task's state, step, speed, loss and restarts."""
    folder = folders.find_run(run)
    if watch:
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
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
    return ending.take_down(folders.runs_dir(), run, spec.parse_count("timeout", timeout, 0, 10**9), shell(c))


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


@task(keys=either(listing.KEYS))
def runs(c, sort="", reverse=False, filter="", limit="", sweep="", json=False):
    """List all runs: result, duration, score, strategy, tasks, commit, restarts, disk use."""
    most = spec.parse_count("limit", limit, 1, 10**9) if limit else 0
    filters = [part for part in filter.split(",") if part]
    rows = sweeping.best_first(sweep) if sweep else listing.list_runs(folders.runs_dir())
    found = listing.choose_runs(rows, sort, reverse, filters, most)
    show({"runs": found}, lambda _: listing.table_lines(found, filters), as_json=json)


@task()
def compare(c, run=None, other=None, third=None, fourth=None, json=False):
    """Show what differs between runs, their results, and whether their final weights are the same."""
    names = [name for word in (run, other, third, fourth) for name in (word or "").split(",") if name]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(f"compare {' '.join(names)}: name two runs or more: {COMMAND} compare first second third")
    if len(names) > listing.MAX_RUNS:
        raise UsageError(f"compare: {len(names)} runs, expected at most {listing.MAX_RUNS}")
    found = [folders.find_run(name) for name in names]
    show(listing.compare_runs(found), lambda value: listing.comparison_lines(value, found), as_json=json)


@task()
def report(c, run=None, output=""):
    """Write one HTML page about a run, which needs no network: curves, cluster, restarts, time, configuration."""
    folder = folders.find_run(run or "")
    path = settings.expanded("output", output).absolute() if output else folder.path / "report.html"
    if not path.parent.is_dir():
        raise UsageError(f"--output {str(path)!r}: the folder {path.parent} does not exist; create it")
    if path.is_symlink() or (path.exists() and not path.is_file()):  # it would be replaced, not written to
        raise UsageError(f"--output {str(path)!r} is a link, a folder or a device, and would be replaced; name a file")
    files.write_text(path, page.render_page(folder))
    print(short_path(path))


@task()
def clean(c, run=None, older="", yes=False):
    """Delete a run, or all old runs: prints which and how large they are, asks, and never touches a run in progress."""
    if bool(run) == bool(older):
        raise UsageError(f"name a run, or say how old: {COMMAND} clean RUN, or {COMMAND} clean --older 7d")
    runs_dir = folders.runs_dir()
    found = [ending.find_ended_run(runs_dir, run)] if run else ending.find_old_runs(runs_dir, spec.parse_age(older))
    if not found:
        print(f"no run has ended longer ago than {older}")
        return
    sizes = [listing.disk_bytes(old.path) for old in found]
    ages = [f"{listing.duration(time.time() - ending.end_time(old))} ago" for old in found]
    names = [old.name for old in found]
    print("\n".join(columns(zip(names, ages, map(size, sizes), strict=True), right=(1, 2))))
    question = f"delete {counted(len(found), 'run')} with checkpoints and logs, {size(sum(sizes))}? [y/N] "
    if not yes and not sys.stdin.isatty():
        raise UsageError("clean asks before it deletes, and there is no terminal to ask on; add --yes")
    if not yes and ask_user(question) not in ("y", "yes"):
        print("nothing was deleted")
        return
    if left := ending.delete_runs(found):
        raise RunFailed(f"{counted(len(left), 'run')} could not be deleted: {'; '.join(left)}")
    print(f"deleted {counted(len(found), 'run')}")


@task(has_dry_run=True)
def evaluate(c, run=None, trust=False, json=False):
    """Evaluate a run's newest checkpoint on the whole test split, in one process without a strategy."""
    _run(c, run, "evaluate", *(["--json"] if json else []), trust=trust)


@task(has_dry_run=True)
def export(c, run=None, serving="", trust=False):
    """Write a run's newest checkpoint as a SavedModel to its folder export/."""
    words = ["--serving", str(settings.expanded("serving", serving).absolute())] if serving else []
    _run(c, run, "export", *words, trust=trust)


@task(has_dry_run=True)
def predict(c, run=None, image="", features="", trust=False):
    """Print what a run's exported model predicts for an image, or for an example of any features."""
    if bool(image) == bool(features):
        raise UsageError("expected --image or --features: an image file such as boot.png, or a JSON file of an example")
    option, name = ("image", image) if image else ("features", features)
    _run(c, run, "predict", f"--{option}", str(settings.expanded(option, name).absolute()), trust=trust)


def _run(c, run, verb, *words, trust):
    """Run `python -m train.saved_model` on a run, with `trust` even another user's, after installing its packages."""
    folder = folders.find_run(run)
    if not trust:
        provenance.check_trusted(folder)
    for part in (folder.checkpoints, folder.export, folder.path / "metrics"):
        files.refuse_links(part)  # TensorFlow would follow them
    if folder.script:
        why = "it is the run of a script, and only the script knows its model and data"
        raise UsageError(f"{verb} {folder.name}: {why}; do it there, or name a run of the built-in trainer")
    path = [*folder.started.code_dirs]
    if named := folder.started.requirements:
        path.append(str(user_files.install_packages(Path(named), registry.LOCAL.python)))
    path += python_path()
    where = ["--run-dir", str(folder.path), "--data-dir", str(folders.data_dir())]
    command = shlex.join([sys.executable, "-m", "train.saved_model", verb, *where, *words])
    variables = recorded_variables(folder.started.env) | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})
    secrets = settings.read_secrets(parse_secrets(folder.started.secrets))
    if not c.config.run.dry:
        print_wait(f"{verb} {folder.name}: importing TensorFlow first")
    shell(c, quiet=True, secrets=secrets)(with_variables(variables, command))
