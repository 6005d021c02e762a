"""The tasks that look back: all runs, their differences, a page about one, their disk."""

import sys
import time

from cluster.contract import settings, spec
from cluster.host.cli.command_line import ask_user, show, task
from cluster.host.control import ending
from cluster.host.launch import folders
from cluster.host.reports import listing, page
from cluster.host.sweep import best_first
from cluster.host.view.columns import columns
from cluster.system.errors import RunFailed, UsageError
from cluster.system.files import write_text
from cluster.system.messages import COMMAND, counted, either, short_path, size


@task(keys=either(listing.KEYS))
def runs(c, sort="", reverse=False, filter="", limit="", sweep="", json=False):
    """List all runs: result, duration, score, strategy, tasks, commit, restarts, disk use."""
    most = spec.parse_count("limit", limit, 1, 10**9) if limit else 0
    filters = [part for part in filter.split(",") if part]
    rows = best_first(sweep) if sweep else listing.list_runs(folders.runs_dir())
    found = listing.choose_runs(rows, sort, reverse, filters, most)
    show({"runs": found}, lambda _: listing.table_lines(found), as_json=json)


@task()
def compare(c, run=None, other=None, third=None, fourth=None, json=False):
    """Show what differs between runs, their results, and whether their final weights are the same."""
    words = [run, other, third, fourth]
    names = [name for word in words for name in (word or "").split(",") if name]
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
    write_text(path, page.render_page(folder))
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
