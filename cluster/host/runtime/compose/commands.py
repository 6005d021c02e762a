"""The `docker compose` commands, which `--dry` prints and one can paste."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster.contract.spec import ClusterSpec
from cluster.host.runtime.compose.overlay import FILES, project, task_user, tensorboard_project
from cluster.system.paths import ROOT


def command(overlay_path: Path, *words: str, progress: str = "quiet") -> str:
    """Return a `docker compose` command on a run's services, as its overlay says."""
    files = ["-f", str(FILES / "compose.yaml"), "-f", str(overlay_path)]
    return shlex.join(["docker", "compose", f"--progress={progress}", "--project-directory", str(ROOT), *files, *words])


def ending(run_dir: Path, *words: str) -> str:
    """Return a `docker compose` command that ends what a run started.

    By the labels that the engine keeps, without the overlay: tasks can rewrite that, and Compose would do on the host,
    and with other projects, what it then says.
    """
    return shlex.join(["docker", "compose", "--progress=quiet", "--project-name", project(run_dir), *words])


def up(overlay_path: Path, spec: ClusterSpec) -> str:
    """Return the command that starts the tasks."""
    names = [task.name for task in spec.tasks]
    return command(overlay_path, "up", "--detach", "--no-build", "--pull", "never", *names)


def watch(overlay_path: Path) -> str:
    """Return the command that builds the tasks' image again and replaces their containers when its files change."""
    return command(overlay_path, "watch", "--no-up", progress="plain")


def tensorboard(runs_dir: Path, port: int, *words: str) -> str:
    """Return a command on the TensorBoard that shows `runs_dir` on 127.0.0.1:`port`."""
    settings = {"RUNS_DIR": str(runs_dir), "TENSORBOARD_PORT": str(port), "TASK_USER": task_user()}
    compose = [
        "docker",
        "compose",
        "--progress=quiet",
        "--project-directory",
        str(ROOT),
        "-f",
        str(FILES / "compose.yaml"),
    ]
    compose += ["-p", tensorboard_project(runs_dir), "--profile", "tensorboard", *words]
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items()) + " " + shlex.join(compose)
