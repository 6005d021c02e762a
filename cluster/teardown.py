"""Ending what a run started, and finding what is left of runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster import compose, engine, local
from cluster.liveness import silent
from cluster.runs import RunFolder


def in_progress(run: RunFolder) -> bool:
    """Whether the run still trains, or should."""
    return run.cluster.exists() and not run.ended and not silent(run)


def is_docker(run: RunFolder) -> bool:
    """Whether the run's tasks are containers."""
    return bool(run.composed.get("x-runtime") == "docker")


def kill(run: RunFolder, sh: Callable[[str], object]) -> None:
    """End every task of a run at once, without saving."""
    run.end("stopped", task="user")
    remove(run, sh, grace_s=0)  # Compose's own `kill` fails where an agent has seen the outcome and ended first


def remove(run: RunFolder, sh: Callable[[str], object], *, grace_s: int = 10) -> None:
    """End and remove every process, container and network of a run. Its folder stays."""
    if is_docker(run):
        sh(compose.ending(run.path, "down", "--timeout", str(grace_s), "--volumes", "--remove-orphans"))
    else:
        local.kill(run)


def leftovers(runs_dir: Path) -> list[RunFolder]:
    """Return the runs of a folder of which a process, a container or a network is left."""
    code, projects = engine.ask("network", "ls", "--format", '{{.Label "com.docker.compose.project"}}')
    left = []
    for path in sorted(runs_dir.glob("*/compose.json")):
        run = RunFolder(path.parent)
        if compose.project(run.path) in (projects.split() if code == 0 else []) or local.processes_left(run):
            left.append(run)
    return left
