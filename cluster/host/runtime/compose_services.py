"""The cluster as Compose services: what a container is, which files its user may read, and the commands on it.

`compose/templates.yaml` holds how a task runs, `compose/compose.yaml` what all runs share; the overlay adds one
explicit service a task. A scaled service would not do: its replicas have no index.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.contract import tf_config
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec, Task
from cluster.host.gpu.placement import NO_DEVICE, Placement
from cluster.host.image import engine
from cluster.host.runtime.payload import Payload
from cluster.system import files
from cluster.system.errors import PrerequisiteError
from cluster.system.paths import ROOT

FILES = ROOT / "compose"
RUNS_MOUNT = "/runs"
DATA_MOUNT = "/data"
GPU_SHM = "1gb"
"""Shared memory of a task with GPUs, as NVIDIA's NCCL guide has it: the engine's 64 MB are too few for its buffers."""
GPU_LIMITS = {"memlock": -1, "stack": 64 * 2**20}
"""NCCL locks the memory that GPUs read, and its threads want the stack that NVIDIA's own images are run with."""
NETWORK_INTERFACE = "eth0"
"""What the cluster's network is called in a container: Compose attaches the first by name first."""
RUN_LABEL = "tf-cluster.run"
"""The label of a run's containers and networks whose value is the run's name."""
TASK_LABEL = "tf-cluster.task"
UNPRIVILEGED = 10001
"""User and group of the images, for tasks that root starts."""


@dataclass(frozen=True)
class Containers:
    """What the containers of a run need from the host."""

    run_dir: Path
    data_dir: Path
    image: str
    user: str
    """`uid:gid`."""
    memory_bytes: int
    """What each of them may use of the machine's memory."""
    mounts: Sequence[tuple[Path, str]] = ()
    """Folders of the host that the tasks read, and where."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that every task gets; None is the value that the caller of `docker compose` has."""
    way_out: bool = False
    """Whether the tasks may reach what lies outside of their cluster, as a script does that fetches its data."""
    egress: bool = False
    """Whether the tasks of the built-in trainer may, too, as where they report to a server."""
    gpus: Placement = field(default_factory=Placement)


def project(run_dir: Path) -> str:
    """Return the Compose project of a run: readable, legal, and another one for each run folder of this machine."""
    slug = re.sub(r"[^a-z0-9_-]+", "-", run_dir.name.lower()).strip("-_")[:32]
    return f"tf-cluster-{slug}-{_digest(run_dir)}"


def tensorboard_project(runs_dir: Path) -> str:
    """Return the Compose project of the TensorBoard that shows a folder of runs."""
    return f"tf-cluster-tensorboard-{_digest(runs_dir)}"


def task_user() -> str:
    """Return whom the tasks run as: the caller, so that the run folder is theirs; but never root."""
    return f"{os.getuid() or UNPRIVILEGED}:{os.getgid() or UNPRIVILEGED}"


def overlay(spec: ClusterSpec, containers: Containers, command: list[str]) -> dict[str, Any]:
    """Return the overlay that adds the run's tasks, whose agents get `command`, to `compose/compose.yaml`."""
    services = {task.name: _service(spec, task, containers, command) for task in spec.tasks}
    labelled = {"labels": {RUN_LABEL: containers.run_dir.name}}
    networks = dict.fromkeys(_networks(containers), labelled)
    return {"name": project(containers.run_dir), "services": literal(services), "networks": literal(networks)}


def _networks(containers: Containers) -> list[str]:
    """Return the names of the networks that every task is in, as in `compose/compose.yaml`."""
    return ["cluster", "egress"] if containers.way_out or containers.egress else ["cluster"]


def literal(value: Any) -> Any:
    """Return the value with every dollar sign doubled: Compose would read a single one as a variable."""
    if isinstance(value, dict):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [literal(part) for part in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _service(spec: ClusterSpec, task: Task, containers: Containers, command: list[str]) -> dict[str, Any]:
    gpus = containers.gpus
    given = environment(spec, task, containers)
    service: dict[str, Any] = {
        "extends": {"file": str(FILES / "templates.yaml"), "service": task.role.value},
        "image": containers.image,
        "hostname": task.host,
        "user": containers.user,
        "mem_limit": containers.memory_bytes,
        "memswap_limit": containers.memory_bytes,  # of both together: no swap
        "environment": given | _gpu_environment(gpus, task.name, given),
        "volumes": volumes(containers),
        "labels": labels(containers, task),
    }
    if ids := gpus.of(task.name):
        service |= _reserve(ids) | {"shm_size": GPU_SHM, "ulimits": dict(GPU_LIMITS)}
    if command:
        service["command"] = command
    if len(networks := _networks(containers)) > 1:
        service["networks"] = networks
    if containers.way_out:
        service["extends"]["service"] = "script"
    return service


def environment(spec: ClusterSpec, task: Task, containers: Containers) -> dict[str, str | None]:
    """Return the variables of a task's container; None is the value that the caller of Docker's client has."""
    own: dict[str, str | None] = {"TASK": task.name, "RUN_DIR": f"{RUNS_MOUNT}/{containers.run_dir.name}"}
    own |= {"DATA_DIR": DATA_MOUNT, **containers.environment}
    if text := tf_config.dumps(spec, task):
        own["TF_CONFIG"] = text
    return own


def volumes(containers: Containers) -> list[dict[str, Any]]:
    """Return the folders of the host that every task has mounted."""
    found: list[dict[str, Any]] = [
        {"type": "bind", "source": str(containers.run_dir), "target": f"{RUNS_MOUNT}/{containers.run_dir.name}"},
        _read_only(containers.data_dir, DATA_MOUNT),
        *(_read_only(source, target) for source, target in containers.mounts),
    ]
    if containers.way_out:
        scratch = RunFolder(containers.run_dir).scratch
        found.append({"type": "bind", "source": str(scratch), "target": "/tmp"})  # noqa: S108
    return found


def labels(containers: Containers, task: Task) -> dict[str, str]:
    """Return the labels by which a task's container is found."""
    return {RUN_LABEL: containers.run_dir.name, TASK_LABEL: task.name}


def _gpu_environment(gpus: Placement, task: str, given: Collection[str]) -> dict[str, str]:
    """Return the variables for a container's GPUs; where other tasks have some and it has none, that it has none."""
    if not gpus.ids:
        return {}
    if not gpus.of(task):  # an engine whose default runtime is NVIDIA's could hand over all of them
        return {"CUDA_VISIBLE_DEVICES": NO_DEVICE, "NVIDIA_VISIBLE_DEVICES": "void"}
    return gpus.environment(task, given) | {"NCCL_SOCKET_IFNAME": NETWORK_INTERFACE}


def _reserve(ids: Sequence[str]) -> dict[str, Any]:
    """Return the part of a service that requests GPUs from the engine."""
    device = {"driver": "nvidia", "device_ids": list(ids), "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _read_only(source: Path, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": str(source), "target": target, "read_only": True}


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]


def check_readable(payload: Payload, user: str) -> None:
    """Check that containers can read what is mounted: where root starts them they run as another user."""
    if os.getuid() != 0:
        return
    needed = [(payload.script, stat.S_IROTH)] if payload.script else []
    for path, bits in [*needed, *((folder, stat.S_IROTH | stat.S_IXOTH) for folder, _ in payload.mounts())]:
        if path == payload.packages:
            continue  # perhaps not installed yet, and readable whatever the umask
        if path in payload.secrets.values():
            _check_secret(path, user)
            continue
        if path.stat().st_mode & bits != bits:
            raise PrerequisiteError(
                f"containers run as user {user}, who cannot read {path}: `chmod -R o+rX {shlex.quote(str(path))}`, "
                "or use --runtime local"
            )


def _check_secret(path: Path, user: str) -> None:
    """Check that containers can read a secret's file, which need not be readable to others."""
    found = path.stat()
    if not found.st_mode & (stat.S_IRUSR if found.st_uid == UNPRIVILEGED else stat.S_IROTH):
        raise PrerequisiteError(
            f"containers run as user {user}, who cannot read {path}: `chown {UNPRIVILEGED} {shlex.quote(str(path))}`, "
            "or use --runtime local"
        )


def let_tasks_read(runs_dir: Path, data_dir: Path) -> None:
    """Make what root prepared readable for the containers' user, perhaps under another umask."""
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
    """Make the containers' user the owner of a folder, where root starts them; never what a link in them names."""
    if os.getuid() != 0:
        return
    for _, inside, others, descriptor in os.fwalk(folder):
        for name in (".", *inside, *others):
            os.chown(name, UNPRIVILEGED, UNPRIVILEGED, dir_fd=descriptor, follow_symlinks=False)


def compose_command(overlay_path: Path, *words: str) -> str:
    """Return a `docker compose` command on a run's services, as its overlay says."""
    files = ["-f", str(FILES / "compose.yaml"), "-f", str(overlay_path)]
    return shlex.join(["docker", "compose", "--progress=quiet", "--project-directory", str(ROOT), *files, *words])


def end_command(run_dir: Path, *words: str) -> str:
    """Return a `docker compose` command that ends what a run started.

    By the labels that the engine keeps, without the overlay: tasks can rewrite that, and Compose would do on the host,
    and with other projects, what it then says.
    """
    return shlex.join(["docker", "compose", "--progress=quiet", "--project-name", project(run_dir), *words])


def up_command(overlay_path: Path, spec: ClusterSpec) -> str:
    """Return the command that starts the tasks."""
    names = [task.name for task in spec.tasks]
    return compose_command(overlay_path, "up", "--detach", "--no-build", "--pull", "never", *names)


def is_running(compose_project: str) -> bool:
    """Return whether a container of a Compose project runs."""
    code, text = engine.ask("ps", "--quiet", "--filter", f"label=com.docker.compose.project={compose_project}")
    return code == 0 and bool(text)


def run_ending(command: str, sh: Callable[[str], object], subject: str) -> None:
    """Run a command that ends containers; where no engine answers, the error says that they may continue."""
    try:
        sh(command)
    except Exception as error:
        if not (answer := engine.probe()).ready:
            raise PrerequisiteError(
                f"{subject}: {answer.detail}; start the engine, then `invoke down` again"
            ) from error
        raise


def tensorboard_command(runs_dir: Path, port: int, *words: str) -> str:
    """Return a command on the TensorBoard that shows `runs_dir` on 127.0.0.1:`port`."""
    settings = {"RUNS_DIR": str(runs_dir), "TENSORBOARD_PORT": str(port), "TASK_USER": task_user()}
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    command = ["docker", "compose", "--progress=quiet", "--project-directory", str(ROOT)]
    command += ["-f", str(FILES / "compose.yaml"), "-p", tensorboard_project(runs_dir), "--profile", "tensorboard"]
    return f"{variables} {shlex.join([*command, *words])}"
