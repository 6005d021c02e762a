"""From what was asked on the command line to a run that is started: checks first, then the folder, then the tasks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import compose, engine, images, local, spec, tensorboard, tf_config
from cluster.errors import ClusterError, PrerequisiteError, UsageError, nearest
from cluster.runs import RunFolder, read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
MIN_FREE_BYTES = 512 * 2**20
"""Free disk space without which a run is not started: its checkpoints, logs and export would not fit."""

Shell = Callable[[str], object]
"""Runs a shell command and shows it; raises where it fails."""


@dataclass(frozen=True)
class Request:
    """What was asked for, as typed."""

    workers: str = "2"
    ps: str = "0"
    evaluator: bool = False
    preset: str = "fashion_mnist"
    strategy: str = "auto"
    devices: str = "1"
    runtime: str = "auto"
    checkpoint_every: str = ""
    name: str = ""
    resume: str = ""
    fresh: bool = False
    tensorboard_port: str = str(tensorboard.PORT)
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """A run that was checked and can be started."""

    run: RunFolder
    cluster: spec.ClusterSpec
    config: dict[str, Any]
    runtime: str
    why_runtime: str
    compose: dict[str, Any]
    tensorboard_port: int
    resumes: bool
    replaces: bool

    def to_json(self) -> dict[str, Any]:
        """Return the plan for `invoke plan --json`."""
        divisor = self.cluster.batch_divisor
        return {
            "run": self.run.name,
            "runtime": self.runtime,
            "strategy": self.cluster.strategy_class,
            "replicas": self.cluster.replicas,
            "global_batch": self.config["global_batch"],
            "replica_batch": self.config["global_batch"] // divisor,
            "tensorboard": tensorboard.address(self.tensorboard_port) if self.tensorboard_port else None,
            "tasks": [
                {"task": task.name, "address": task.address, "tf_config": tf_config.render(self.cluster, task)}
                for task in self.cluster.tasks
            ],
            "config": self.config,
            "compose": self.compose,
        }


def runs_dir() -> Path:
    """Return the folder of all runs: RUNS_DIR, or `runs` in this checkout."""
    return Path(os.environ.get("RUNS_DIR", ROOT / "runs")).absolute()


def data_dir() -> Path:
    """Return the folder of prepared data: DATA_DIR, or `data` in this checkout."""
    return Path(os.environ.get("DATA_DIR", ROOT / "data")).absolute()


def find_run(name: str = "") -> RunFolder:
    """Return the run called `name`, or the current one.

    Raises:
        UsageError: there is none.
    """
    current = runs_dir() / ".current"
    if not name:
        if not current.exists() or not (runs_dir() / current.read_text().strip()).exists():
            raise UsageError("there is no current run; start one with `invoke up`, or name one of runs/")
        name = current.read_text().strip()
    run = RunFolder(runs_dir() / spec.check_run_name(name))
    if not run.cluster.exists():
        known = [path.parent.name for path in runs_dir().glob("*/cluster.json")]
        raise UsageError(f"there is no run {name!r} in {shown(runs_dir())}{nearest(name, known) if known else ''}")
    return run


def plan(request: Request) -> Plan:
    """Check a request and return what would be started. Changes nothing.

    Raises:
        UsageError: something asked for cannot be done.
        PrerequisiteError: something that this machine must have is missing.
    """
    asked = spec.build(request.workers, request.ps, request.evaluator, request.strategy, request.devices)
    port = spec.parse_count("tensorboard-port", request.tensorboard_port, 0, 65535)
    run = _run_folder(request)
    config = _resolve_config(request, run)
    spec.check_global_batch(config["global_batch"], asked.batch_divisor)
    runtime, why = engine.choose_runtime(request.runtime)
    if runtime == "local":
        ports = local.free_ports(len(asked.tasks))
        cluster = spec.build(
            request.workers, request.ps, request.evaluator, request.strategy, request.devices, ports=ports
        )
        how = local.processes_of(cluster, run.path, data_dir(), [])
    else:
        cluster = asked
        containers = compose.Containers(run.path, data_dir(), images.train_image("cpu"), compose.task_user())
        how = {"x-runtime": "docker", **compose.overlay(cluster, containers, [])}
    return Plan(
        run, cluster, config, runtime, why, how, port, bool(request.resume), request.fresh and run.path.exists()
    )


def start(plan: Plan, sh: Shell, *, began: float) -> None:
    """Start every task of a plan: data, image, run folder, tasks.

    Args:
        plan: what to start.
        sh: runs commands.
        began: when `up` was called, for the summary's times.
    """
    check_machine(plan)
    prepare_data(plan.config["dataset"], sh)
    if plan.runtime == "docker":
        build_images(sh)
    _write_folder(plan, began)
    try:
        if plan.runtime == "docker":
            _hand_over(plan.run.path)
            sh(compose.up(plan.run.compose, plan.cluster))
        else:
            local.start(plan.run)
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what is told
            remove(plan.run, sh)
        raise


def commands(plan: Plan) -> list[str]:
    """Return the commands that `start` runs, to be shown or pasted. The run folder must exist for the last ones."""
    shown = [data_command("prepare", plan.config["dataset"])]
    if plan.runtime == "docker":
        shown += image_commands()
        shown += [compose.up(plan.run.compose, plan.cluster)]
        if plan.tensorboard_port:
            shown += [compose.tensorboard(runs_dir(), plan.tensorboard_port, "up", "--detach", "tensorboard")]
        return shown
    for task in plan.compose["tasks"].values():
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in task["environment"].items())
        shown.append(f"{environment} {shlex.join(task['command'])} &")
    return shown


def check_machine(plan: Plan) -> None:
    """Check what this machine must have before anything is started.

    Raises:
        PrerequisiteError: memory, disk space or a port is missing.
    """
    if plan.runtime == "local":
        local.check_memory(len(plan.cluster.tasks))
    try:
        runs_dir().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrerequisiteError(f"runs folder {runs_dir()}: {error.strerror}; set RUNS_DIR to one you own") from error
    free = shutil.disk_usage(runs_dir()).free
    if free < MIN_FREE_BYTES:
        raise PrerequisiteError(
            f"{free / 2**20:.0f} MiB are free for {shown(runs_dir())}, a run needs {MIN_FREE_BYTES / 2**20:.0f}; "
            "free space, or set RUNS_DIR to another disk"
        )
    if plan.tensorboard_port:
        tensorboard.check_port(runs_dir(), plan.tensorboard_port)


def prepare_data(name: str, sh: Shell, *, fresh: bool = False) -> None:
    """Prepare the dataset unless it is: once, here, never from several tasks at once."""
    sh(data_command("prepare", name) + (" --fresh" if fresh else ""))


def data_command(verb: str, name: str) -> str:
    """Return the command that prepares or verifies a dataset, in a process that may import TensorFlow."""
    return shlex.join([sys.executable, "-m", "train.data", verb, "--name", name, "--data-dir", str(data_dir())])


def build_images(sh: Shell) -> None:
    """Build both images; a second build with nothing changed takes about a second."""
    for command in image_commands():
        sh(command)


def image_commands() -> list[str]:
    """Return the commands that build the images of this checkout."""
    names = (images.train_image("cpu"), images.TENSORBOARD_IMAGE)
    commands = images.build_commands("cpu", images.default_base())
    if all(engine.ask("image", "inspect", name)[0] == 0 for name in names):
        # A rebuild with little or nothing changed takes seconds: then only what goes wrong is worth reading.
        return [command.replace("docker build", "docker build --quiet", 1) for command in commands]
    return commands


def shown(path: Path) -> str:
    """Return a path as short as it can be written from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def in_progress(run: RunFolder) -> bool:
    """Whether the run still trains, or should."""
    return run.cluster.exists() and not run.summary.exists() and not run.silent


def tensorboard_runtime(requested: str, sh: Shell) -> str:
    """Return `docker` or `local` for a TensorBoard started by itself; its image is built where it needs one."""
    runtime, _ = engine.choose_runtime(requested)
    if runtime == "docker" and tensorboard.running(runs_dir()) is None:
        build_images(sh)
    runs_dir().mkdir(parents=True, exist_ok=True)
    return runtime


def is_docker(run: RunFolder) -> bool:
    """Whether the run's tasks are containers."""
    return bool(read_json(run.compose).get("x-runtime") == "docker")


def kill(run: RunFolder, sh: Shell) -> None:
    """End every task of a run at once, without saving."""
    run.end("stopped", task="user")
    if is_docker(run):
        sh(compose.command(run.compose, "kill"))
    else:
        local.kill(run)


def remove(run: RunFolder, sh: Shell) -> None:
    """End and remove every process, container and network of a run. Its folder stays."""
    if is_docker(run):
        sh(compose.command(run.compose, "down", "--timeout", "10", "--volumes", "--remove-orphans"))
    else:
        local.kill(run)


def leftovers() -> list[RunFolder]:
    """Return the runs of this checkout of which a process, a container or a network is left."""
    code, projects = engine.ask("network", "ls", "--format", '{{.Label "com.docker.compose.project"}}')
    left = []
    for path in sorted(runs_dir().glob("*/compose.json")):
        run = RunFolder(path.parent)
        if compose.project(run.path) in (projects.split() if code == 0 else []) or local.processes_left(run):
            left.append(run)
    return left


def _run_folder(request: Request) -> RunFolder:
    """Return the folder that the run shall have, checked against what is there."""
    if request.resume:
        if request.name or request.fresh:
            raise UsageError("--resume names its run: leave out --name and --fresh")
        run = find_run(request.resume)
        if in_progress(run):
            raise UsageError(f"run {run.name!r} is still in progress; `invoke stop` it before it can be resumed")
        return run
    name = request.name or f"{request.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunFolder(runs_dir() / spec.check_run_name(name))
    if run.path.exists() and not request.fresh:
        raise UsageError(
            f"run {name!r} exists; go on with --resume {name}, or start it again with --name {name} --fresh"
        )
    if run.path.exists() and in_progress(run):
        raise UsageError(f"run {name!r} is still in progress; `invoke down {name}` before it is started again")
    return run


def _resolve_config(request: Request, run: RunFolder) -> dict[str, Any]:
    """Have the training program check the configuration: it knows it, and this side must not import it."""
    overrides = list(request.overrides)
    if request.checkpoint_every:
        overrides = ["--checkpoint-every", request.checkpoint_every, *overrides]
    command = [sys.executable, "-m", "train", "--print-config", "--preset", request.preset]
    if request.resume:
        command += ["--base", str(run.config)]
    done = subprocess.run([*command, "--", *overrides], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1].removeprefix("error: ")
        error = UsageError if done.returncode == UsageError.exit_code else ClusterError
        raise error(told)
    config: dict[str, Any] = json.loads(done.stdout)
    return config


def _write_folder(plan: Plan, began: float) -> None:
    if plan.replaces:
        shutil.rmtree(plan.run.path)
    plan.run.create()
    write_json(plan.run.config, plan.config)
    write_json(plan.run.cluster, plan.cluster.to_json())
    write_json(plan.run.compose, plan.compose)
    if plan.resumes:
        plan.run.reopen()
        for beat in (plan.run.path / "status").glob("*.json"):
            beat.unlink()
    write_json(plan.run.control / "started.json", {"time": began, "runtime": plan.runtime})
    plan.run.begin_generation(plan.run.generation + 1 if plan.resumes else 0, resumed=plan.resumes)
    (runs_dir() / ".current").write_text(plan.run.name + "\n")


def _hand_over(path: Path) -> None:
    """Give the run folder to the user that the containers run as, where root starts them."""
    if os.getuid() == 0:
        runs_dir().chmod(runs_dir().stat().st_mode | 0o055)  # TensorBoard reads all runs as that user
        for name in (path, *path.rglob("*")):
            os.chown(name, compose.UNPRIVILEGED, compose.UNPRIVILEGED, follow_symlinks=False)
