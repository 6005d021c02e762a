"""Ending what a run started, and finding what is left of runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import EXIT_FAILED, ClusterError, PrerequisiteError
from cluster.image import engine
from cluster.results import summary
from cluster.run import claim, owner
from cluster.run.folder import RunFolder
from cluster.run.liveness import silent
from cluster.runtime import compose, local
from cluster.system import process_table


def in_progress(run: RunFolder) -> bool:
    """Whether the run still trains, or should: also before its first sign of life."""
    return run.cluster.exists() and not run.ended and (not silent(run) or _alive(run))


def _alive(run: RunFolder) -> bool:
    """Whether what was started of the run still runs, whether or not its tasks give a sign of life."""
    owned = owner.read(run)
    if owned is None or owned.runtime == "local":
        return owned is not None and owned.alive
    code, text = engine.ask(
        "ps", "--quiet", "--filter", f"label=com.docker.compose.project={compose.project(run.path)}"
    )
    return code == 0 and bool(text)


def is_docker(run: RunFolder) -> bool:
    """Whether the run's tasks are containers."""
    if owned := owner.read(run):
        return owned.runtime == "docker"
    return bool(run.composed.get("x-runtime") == "docker")


def kill(run: RunFolder, sh: Callable[[str], object]) -> None:
    """End every task of a run at once, without saving."""
    run.end("stopped", task="user")
    remove(run, sh, grace_s=0)  # Compose's own `kill` fails where an agent has seen the outcome and ended first


def remove(run: RunFolder, sh: Callable[[str], object], *, grace_s: int = 10, contained: bool | None = None) -> None:
    """End and remove every process, container and network of a run. Its folder stays.

    Only for the holder of the run's claim: otherwise what ends may be somebody's who goes on with the run.

    Args:
        run: the run.
        sh: runs commands.
        grace_s: what containers get to end by themselves.
        contained: whether the engine has something of it; by default that is what its record says.

    Raises:
        PrerequisiteError: they are containers, and no engine answers.
        TimedOut: a process does not end.
    """
    if is_docker(run) if contained is None else contained:
        try:
            sh(compose.ending(run.path, "down", "--timeout", str(grace_s), "--volumes", "--remove-orphans"))
        except Exception as error:
            if not (answer := engine.probe()).ready:
                raise _out_of_reach([run.name], answer.detail) from error
            raise
    if not is_docker(run):
        local.kill(run)
    owner.forget(run)


def finish(run: RunFolder, sh: Callable[[str], object]) -> str:
    """Remove what is left of a run that has ended; return in words what could not be removed, empty if nothing.

    What became of the run is not to be lost over that. A run that somebody goes on with meanwhile is left alone.
    """
    try:
        with claim.hold(run, "ended", wait_s=claim.WAIT_S):
            return try_remove(run, sh) if run.summary.exists() else ""
    except claim.Taken:
        return ""
    except (ClusterError, KeyboardInterrupt) as error:
        return _left(run, error)


def try_remove(run: RunFolder, sh: Callable[[str], object], *, grace_s: int = 10) -> str:
    """Remove as `remove` does; return in words what could not be removed, empty if nothing."""
    try:
        remove(run, sh, grace_s=grace_s)
    except (Exception, KeyboardInterrupt) as error:
        return _left(run, error)
    return ""


def _left(run: RunFolder, error: BaseException) -> str:
    told = " ".join(str(error).split()) or "interrupted"
    return f"not all of {run.name} could be removed; `invoke down {run.name}` tries again: {told}"


def record_end(run: RunFolder, state: str = "stopped", error: str = "") -> None:
    """Write the summary of a run that was ended before its tasks could, for whoever watches it."""
    with contextlib.suppress(Exception):  # a damaged folder must not keep anybody from ending the run
        if run.cluster.exists() and not run.summary.exists():
            run.end(state, task="user" if state == "stopped" else "", exit_code=EXIT_FAILED, error=error)
            summary.write(run, settle_s=0)


@dataclass(frozen=True)
class Leftovers:
    """What is left of the runs of a folder, found in one look at the processes and at the engine."""

    runs: list[RunFolder]
    """Those that can be ended."""
    contained: list[RunFolder]
    """Those of them of which the engine has something."""
    out_of_reach: list[RunFolder]
    """Those in containers of an engine that does not answer."""
    why: str
    """Why it does not."""

    def check(self, name: str | None) -> None:
        """Check that the run of a name, or without one every run, is within reach.

        Raises:
            PrerequisiteError: the engine does not answer, and it is in its containers.
        """
        if names := [run.name for run in self.out_of_reach if name in (None, "", run.name)]:
            raise _out_of_reach(names, self.why)


def leftovers(runs_dir: Path) -> Leftovers:
    """Return the runs of a folder of which a process, a container or a network is left."""
    recorded = owner.recorded(runs_dir)
    names = {run.name for run in recorded} | {path.parent.name for path in runs_dir.glob("*/compose.json")}
    answers, found = _contained(runs_dir, names)
    table = process_table.ProcessTable()
    out = [] if answers else [run for run in recorded if is_docker(run)]
    here = {run.name for run in recorded if local.processes_left(run, table)}
    left = [RunFolder(runs_dir / name) for name in sorted(found | here)]
    contained = [run for run in left if run.name in found]
    return Leftovers(left, contained, out, "" if answers else engine.probe().detail)


def _contained(runs_dir: Path, names: set[str]) -> tuple[bool, set[str]]:
    """Return whether the engine answers, and the runs of a folder that it has something of, by its labels.

    The folder of such a run may be gone: its name is a label, and that it is one of this folder shows in its project.
    """
    shown = f'{{{{.Label "com.docker.compose.project"}}}}\t{{{{.Label "{compose.RUN_LABEL}"}}}}'
    known = {compose.project(runs_dir / name): name for name in names}
    found = set()
    for words in (["network", "ls"], ["ps", "--all"]):
        code, text = engine.ask(*words, "--format", shown)
        if code:
            return False, set()
        for line in text.splitlines():
            project, _, name = line.partition("\t")
            if project in known:
                found.add(known[project])
            elif name == Path(name).name and compose.project(runs_dir / name) == project:
                found.add(name)
    return True, found


def _out_of_reach(names: list[str], why: str) -> PrerequisiteError:
    return PrerequisiteError(
        f"{', '.join(names)}: in containers, which may go on: {why}; start the engine, then `invoke down` again"
    )
