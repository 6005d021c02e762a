"""`invoke down`: end everything that was started; report what cannot be ended, also by the exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.control import watch
from cluster.host.launch import folders, teardown
from cluster.host.runtime import tensorboard
from cluster.host.runtime.base import Shell
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, ClusterError
from cluster.system.messages import plain, short_path
from cluster.system.terminal import error_text, print_lines


def down(runs_dir: Path, name: str | None, timeout_s: float, sh: Shell) -> int:
    """End a run, or every run of a folder and its TensorBoard; return the exit code, that of the first failure.

    One that cannot be ended does not prevent ending the others.

    Args:
        runs_dir: the folder of all runs.
        name: the run's; empty for everything.
        timeout_s: in which a run may save and stop before it is ended.
        sh: runs commands.

    Raises:
        UsageError: there is no such run.
    """
    failures = _Failures()
    left = teardown.leftovers(runs_dir)
    for run in [_named(runs_dir, name, left)] if name else [RunFolder(runs_dir / each) for each in left.found]:
        with failures:
            if run.name in left.unreachable:
                continue
            watch.end(run, "invoke down", timeout_s, sh, also=left.found.get(run.name, ()))
            where = short_path(run.path) if run.path.exists() else "gone"
            print_lines(f"{run.name} is down; its folder is {where}")
    with failures:
        left.check(name)
    if not name:
        with failures:
            if tensorboard.stop(runs_dir, sh):
                print("TensorBoard is down", flush=True)
    return failures.code


def _named(runs_dir: Path, name: str, left: teardown.Leftovers) -> RunFolder:
    """Return the run of a name, also where its folder is gone and only something that runs of it is left."""
    run = RunFolder(runs_dir / spec.check_run_name(name))
    return run if run.name in left.found or run.name in left.unreachable else folders.find_run(name)


class _Failures:
    """Reports errors in a line each, instead of stopping at the first."""

    code = EXIT_DONE

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        message = f"error: {plain(' '.join(str(error).split()) or type(error).__name__)}"
        print(error_text(message), file=sys.stderr, flush=True)
        self.code = self.code or (error.exit_code if isinstance(error, ClusterError) else EXIT_FAILED)
        return True
