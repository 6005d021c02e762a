"""End runs and delete them: `invoke down` and `invoke clean`. Failures are reported, and set the exit code."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.contract import spec
from cluster.contract.run import claim
from cluster.contract.run.folder import RunFolder
from cluster.host.control import foreground
from cluster.host.launch import folders, teardown
from cluster.host.runtime import mirror, tensorboard, warm
from cluster.host.runtime.base import Runtime, Shell
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, ClusterError, PrerequisiteError, TimedOut, UsageError, nearest
from cluster.system.messages import COMMAND, plain, short_path
from cluster.system.terminal import error_text, print_lines


def take_down(runs_dir: Path, name: str | None, timeout_s: float, sh: Shell) -> int:
    """End a run, or without a name all runs and TensorBoard; return the exit code, that of the first failure."""
    codes = []

    @contextlib.contextmanager
    def reported() -> Iterator[None]:
        """Print an error and continue, instead of stopping at the first one."""
        try:
            yield
        except Exception as error:
            message = f"error: {plain(' '.join(str(error).split()) or type(error).__name__)}"
            print(error_text(message), file=sys.stderr, flush=True)
            codes.append(error.exit_code if isinstance(error, ClusterError) else EXIT_FAILED)

    left, unreachable = teardown.find_leftovers(runs_dir)
    runs = [RunFolder(runs_dir / each) for each in left]
    if name:  # its folder may be gone, and only processes or containers left
        run = RunFolder(runs_dir / spec.check_run_name(name))
        runs = [run if name in left or name in unreachable else folders.find_run(name)]
    for run in runs:
        with reported():
            if run.name in unreachable:
                continue
            end_run(run, timeout_s, sh, also=left.get(run.name, ()))
            where = short_path(run.path) if run.path.exists() else "gone"
            print_lines(f"{run.name} is down; its folder is {where}")
    with reported():
        if names := [each for each in unreachable if name in (None, "", each)]:
            raise PrerequisiteError(f"{', '.join(names)}: in {unreachable[names[0]]}, then `{COMMAND} down` again")
    if not name:
        with reported():
            mirror.end_uploads(runs_dir, timeout_s)
            if tensorboard.stop(runs_dir, sh):
                print("TensorBoard is down", flush=True)
    with reported():
        if warm.end():
            print("the process that had imported TensorFlow is down", flush=True)
    return codes[0] if codes else EXIT_DONE


def end_run(run: RunFolder, timeout_s: float, sh: Shell, *, also: Iterable[Runtime] = ()) -> None:
    """Ask a run to save and stop, and remove its leftovers, those on the runtimes `also`, too; it may be damaged.

    Raises:
        Taken: another command holds the run's claim and has not ended in time.
        PrerequisiteError: the run is in containers, and no engine answers.
    """
    try:
        if teardown.in_progress(run):
            foreground.stop(run, f"{COMMAND} down", timeout_s)
    except TimedOut:  # a run that cannot stop is ended nevertheless
        pass
    except Exception as error:
        print(f"{run.name} cannot be stopped: {' '.join(str(error).split())}", file=sys.stderr)
    with claim.hold_claim(run, "ended", wait_s=claim.WAIT_S):
        teardown.remove_run(run, sh, also=also)
        teardown.record_end(run)
        mirror.end_upload(run, timeout_s)


def find_old_runs(runs_dir: Path, older_s: float) -> list[RunFolder]:
    """Return the runs that ended at least `older_s` ago and are not in progress, oldest first."""
    old_runs = []
    for path in runs_dir.iterdir() if runs_dir.is_dir() else ():
        run = RunFolder(path)
        is_run = not path.name.startswith(".") and _is_run(run)
        if is_run and time.time() - end_time(run) >= older_s and not teardown.in_progress(run):
            old_runs.append(run)
    return sorted(old_runs, key=end_time)


def find_ended_run(runs_dir: Path, name: str) -> RunFolder:
    """Return the run called `name`; raise UsageError unless it has ended."""
    run = RunFolder(runs_dir / spec.check_run_name(name))
    if not _is_run(run):
        known = [path.parent.name for path in runs_dir.glob("*/cluster.json")]
        raise UsageError(f"no run {name!r} in {short_path(runs_dir)}{nearest(name, known) if known else ''}")
    if teardown.in_progress(run):
        raise UsageError(f"run {name!r} is in progress; `{COMMAND} down {name}` before it is deleted")
    return run


def _is_run(run: RunFolder) -> bool:
    """Return whether a folder is a run, or the incomplete run of a killed command."""
    if run.path.is_symlink():
        return False  # the target of a link must not be deleted
    return not claim.is_held(run) if run.incomplete else run.cluster.exists()


def end_time(run: RunFolder) -> float:
    """Return when a run ended or, without a summary, last changed its files, in seconds since the epoch."""
    if run.summary.exists():  # a later report or export does not count
        return run.outcome.time if run.outcome else run.summary.lstat().st_mtime
    paths = [run.path, run.summary, run.events_log, run.cluster, run.control, *(run.path / "status").glob("*.json")]
    return max((path.lstat().st_mtime for path in paths if path.exists()), default=0.0)


def delete_runs(runs: Iterable[RunFolder]) -> list[str]:
    """Delete runs, except those that are in progress again; return the errors of runs that remain."""
    errors = []
    for run in runs:
        try:
            with claim.hold_claim(run, "deleted"):
                if teardown.in_progress(run):
                    raise UsageError(f"run {run.name!r} is in progress again; it stays")
                run.delete()
        except (ClusterError, OSError) as error:
            errors.append(f"{run.name}: {' '.join(str(error).split())}")
    return errors
