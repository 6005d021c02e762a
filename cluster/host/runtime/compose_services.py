"""The cluster as Compose services: the containers, the file permissions that they need, and the Compose commands.

`compose/templates.yaml` describes how a task runs, `compose/compose.yaml` the parts that all runs share; the overlay
adds one explicit service for each task, since the replicas of a scaled service have no index.
"""

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.contract import tf_config
from cluster.contract.spec import Task
from cluster.host.image import engine, images
from cluster.host.nvidia import NO_DEVICE
from cluster.host.runtime.base import Workload
from cluster.host.runtime.payload import Payload, container_variables
from cluster.host.runtime.resources import EGRESS
from cluster.system import files
from cluster.system.errors import PrerequisiteError
from cluster.system.messages import COMMAND
from cluster.system.paths import ROOT

FILES = ROOT / "compose"
COMPOSE = ("docker", "compose", "--progress=quiet")
OUR_COMPOSE = (*COMPOSE, "--project-directory", str(ROOT), "-f", str(FILES / "compose.yaml"))
UP = ("up", "--detach", "--no-build", "--pull", "never")
"""The words that start services, whose images must exist."""
RUNS_MOUNT = "/runs"
DATA_MOUNT = "/data"
GPU_SHM = "1gb"
"""Shared memory of a task with GPUs, from NVIDIA's NCCL guide: the default of 64 MB is too small for NCCL's buffers."""
GPU_LIMITS = {"memlock": -1, "stack": 64 * 2**20}
"""NCCL locks the memory that GPUs read, and its threads need the stack size with which NVIDIA's images are run."""
NETWORK_INTERFACE = "eth0"
"""The interface of the cluster's network in a container: Compose attaches networks in the order of their names."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": NO_DEVICE, "NVIDIA_VISIBLE_DEVICES": "void"}
"""The variables of tasks without GPUs: an engine whose default runtime is NVIDIA's could expose all GPUs."""
RUN_LABEL = "tf-cluster.run"
"""The label of a run's containers and networks whose value is the run's name."""
TASK_LABEL = "tf-cluster.task"
UNPRIVILEGED = 10001
"""User and group of the images, for tasks that root starts."""


def project(run_dir: Path) -> str:
    """Return the Compose project of a run: a readable, valid name, unique for each run folder on this machine."""
    slug = re.sub(r"[^a-z0-9_-]+", "-", run_dir.name.lower()).strip("-_")[:32]
    return f"tf-cluster-{slug}-{_digest(run_dir)}"


def tensorboard_project(runs_dir: Path) -> str:
    """Return the Compose project of the TensorBoard that shows a folder of runs."""
    return f"tf-cluster-tensorboard-{_digest(runs_dir)}"


def task_user() -> str:
    """Return the tasks' user and group: the caller's, so that they own the run folder, but never root's."""
    return f"{os.getuid() or UNPRIVILEGED}:{os.getgid() or UNPRIVILEGED}"


def render_overlay(work: Workload) -> dict[str, Any]:
    """Return the overlay that adds the run's tasks to `compose/compose.yaml`."""
    names = ["cluster", "egress"] if _has_way_out(work) else ["cluster"]  # as in `compose/compose.yaml`
    services = {task.name: _service(work, task, names) for task in work.cluster.tasks}
    networks = {name: {"labels": {RUN_LABEL: work.run.name}} for name in names}
    return {"name": project(work.run.path), "services": literal(services), "networks": literal(networks)}


def _has_way_out(work: Workload) -> bool:
    return work.payload.script is not None or work.network.name == EGRESS


def literal(value: Any) -> Any:
    """Return the value with every dollar sign doubled: Compose takes a single one as the start of a variable."""
    if isinstance(value, dict):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [literal(part) for part in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _service(work: Workload, task: Task, networks: Sequence[str]) -> dict[str, Any]:
    service: dict[str, Any] = {
        "extends": {"file": str(FILES / "templates.yaml"), "service": task.role.value},
        **describe_task(work, task),
        "mem_limit": work.memory.task_bytes,
        "memswap_limit": work.memory.task_bytes,  # memory and swap together, so no swap
    }
    environment = service["environment"]
    if ids := work.gpus.of(task.name):
        environment |= work.gpus.environment(task.name, environment) | {"NCCL_SOCKET_IFNAME": NETWORK_INTERFACE}
        device = {"driver": "nvidia", "device_ids": list(ids), "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        service |= {"shm_size": GPU_SHM, "ulimits": dict(GPU_LIMITS)}
    elif work.gpus.ids:
        environment |= NO_GPU
    if len(networks) > 1:
        service["networks"] = networks
    if work.payload.script:
        service["extends"]["service"] = "script"
    return service


def describe_task(work: Workload, task: Task) -> dict[str, Any]:
    """Return the part of a task's service that all containers share; a variable that is None has the client's value."""
    seen = work.payload.mounted()
    run_mount = f"{RUNS_MOUNT}/{work.run.name}"
    environment: dict[str, str | None] = {"TASK": task.name, "RUN_DIR": run_mount, "DATA_DIR": DATA_MOUNT}
    environment |= container_variables(way_out=_has_way_out(work)) | seen.environment(work.cluster, seen.path)
    if text := tf_config.dumps(work.cluster, task):
        environment["TF_CONFIG"] = text
    volumes: list[dict[str, Any]] = [{"type": "bind", "source": str(work.run.path), "target": run_mount}]
    for source, target in ((work.data_dir, DATA_MOUNT), *work.payload.mounts()):
        volumes.append({"type": "bind", "source": str(source), "target": target, "read_only": True})
    if work.payload.script:
        volumes.append({"type": "bind", "source": str(work.run.scratch), "target": "/tmp"})  # noqa: S108
    service = {
        "image": images.train_image(work.accelerator),
        "hostname": task.host,
        "user": task_user(),
        "environment": environment,
        "volumes": volumes,
        "labels": {RUN_LABEL: work.run.name, TASK_LABEL: task.name},
    }
    return service | ({"command": command} if (command := seen.command()) else {})


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]


def check_readable(payload: Payload) -> None:
    """Check that containers can read their mounts: containers that root starts run as another user."""
    if os.getuid() != 0:
        return
    for path in [*([payload.script] if payload.script else []), *(source for source, _ in payload.mounts())]:
        if path == payload.packages:
            continue  # perhaps not installed yet, and readable whatever the umask
        status, fix = path.stat(), "chmod -R o+rX"
        bits = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
        if path in payload.secrets.values():  # secrets need not be readable by others
            bits, fix = stat.S_IRUSR if status.st_uid == UNPRIVILEGED else stat.S_IROTH, f"chown {UNPRIVILEGED}"
        if status.st_mode & bits != bits:
            fix = f"`{fix} {shlex.quote(str(path))}`, or use --runtime local"
            raise PrerequisiteError(f"containers run as user {task_user()}, who cannot read {path}: {fix}")


def let_tasks_read(runs_dir: Path, data_dir: Path) -> None:
    """If root prepared the data and runs, make them readable for the containers' user, whatever the umask was."""
    if os.getuid() != 0:
        return
    runs_dir.chmod(runs_dir.stat().st_mode | 0o055)  # TensorBoard reads all runs as that user
    if not data_dir.exists():
        return
    if (mode := data_dir.stat().st_mode) & 0o055 != 0o055:
        data_dir.chmod(mode | 0o055)
    for folder in ("arrays", "shards"):
        files.make_readable(data_dir / folder)


def give_to_tasks(folder: Path) -> None:
    """If root starts the containers, make their user the owner of a folder and its entries, without following links."""
    if os.getuid() != 0:
        return
    for _, inside, others, descriptor in os.fwalk(folder):
        for name in (".", *inside, *others):
            os.chown(name, UNPRIVILEGED, UNPRIVILEGED, dir_fd=descriptor, follow_symlinks=False)


def overlay_command(overlay_path: Path, *words: str) -> str:
    """Return a `docker compose` command for a run's services, with the run's overlay."""
    return shlex.join([*OUR_COMPOSE, "-f", str(overlay_path), *words])


def is_running(compose_project: str) -> bool:
    """Return whether a container of a Compose project runs."""
    code, text = engine.ask("ps", "--quiet", "--filter", f"label=com.docker.compose.project={compose_project}")
    return code == 0 and bool(text)


def run_ending(command: str, sh: Callable[[str], object], subject: str) -> None:
    """Run a command that ends containers; if no engine answers, the error says that `subject` may continue."""
    try:
        sh(command)
    except Exception as error:
        if not (answer := engine.probe()).ready:
            raise PrerequisiteError(f"{subject}: {answer.detail}; start it, then `{COMMAND} down` again") from error
        raise


def tensorboard_command(runs_dir: Path, port: int, *words: str) -> str:
    """Return a `docker compose` command for the TensorBoard of `runs_dir`, on 127.0.0.1:`port`."""
    settings = {"RUNS_DIR": str(runs_dir), "TENSORBOARD_PORT": str(port), "TASK_USER": task_user()}
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    command = [*OUR_COMPOSE, "-p", tensorboard_project(runs_dir), "--profile", "tensorboard", *words]
    return f"{variables} {shlex.join(command)}"
