"""The runtime of Docker containers: the cluster as Compose services, and the Compose commands.

`compose/templates.yaml` describes how a task runs, `compose/compose.yaml` the parts that all runs share; the overlay
adds one explicit service for each task, since the replicas of a scaled service have no index.
"""

import json
import os
import re
import shlex
import stat
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from cluster.contract import tf_config
from cluster.contract.run import owner, provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Task
from cluster.host import nvidia
from cluster.host.image import engine, images
from cluster.host.runtime import resources
from cluster.host.runtime.base import SLOWED_SHARE, FaultInjector, Finding, Runtime, Shell, Workload, path_digest
from cluster.host.runtime.payload import Payload, container_variables
from cluster.system import files
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND

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
NO_GPU = {"CUDA_VISIBLE_DEVICES": nvidia.NO_DEVICE, "NVIDIA_VISIBLE_DEVICES": "void"}
"""The variables of tasks without GPUs: an engine whose default runtime is NVIDIA's could expose all GPUs."""
RUN_LABEL = "tf-cluster.run"
"""The label of a run's containers and networks whose value is the run's name."""
TASK_LABEL = "tf-cluster.task"
UNPRIVILEGED = 10001
"""User and group of the images, for tasks that root starts."""
PAUSE_TRIES = 5
MEMORY_EATER = ROOT / "docker" / "eat_memory.py"


def project(run_dir: Path) -> str:
    """Return the Compose project of a run: a readable, valid name, unique for each run folder on this machine."""
    slug = re.sub(r"[^a-z0-9_-]+", "-", run_dir.name.lower()).strip("-_")[:32]
    return f"tf-cluster-{slug}-{path_digest(run_dir)}"


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
    return work.payload.script is not None or work.network.name == resources.EGRESS


def literal(value: Any) -> Any:
    """Return the value with every dollar sign doubled: Compose takes a single one as the start of a variable."""
    return json.loads(json.dumps(value).replace("$", "$$"))


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
            fix = f"start the engine, then `{COMMAND} down` again"
            raise PrerequisiteError(f"{subject}: {answer.detail}; {fix}") from error
        raise


class ContainerFaults(FaultInjector):
    """Injects faults into containers, through the engine."""

    storm = FaultInjector.storm | {"partition", "oom", "lose"}

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._undo: list[tuple[str, ...]] = []
        self._at: tuple[str, ...] = ()
        """The options with which Docker's client reaches the engine of the last task."""

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal inside the container: after `docker kill` the engine would not restart the container."""
        identities = self.processes(task)
        pids = " ".join(str(int(identities[which]["pid"])) for which in whose)  # untrusted, for a shell
        # If the agent dies, so does the container, and this command with it.
        self._ask("exec", self._container(task), "sh", "-c", f"kill -{number} {pids}")

    def pause(self, task: str) -> None:
        container = self._container(task)
        # On a busy machine with cgroup v1 runc may fail ("unable to freeze"), and succeed at the next try.
        for _ in range(PAUSE_TRIES - 1):
            if self._ask("pause", container)[0] == 0:
                break
        else:
            self._docker("pause", container)
        self._undo.append((*self._at, "unpause", container))

    def partition(self, task: str) -> None:
        """Disconnect the container from the cluster's network."""
        container = self._container(task)
        networks = json.loads(self._docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", container))
        if (name := next((each for each in networks if each.endswith("_cluster")), None)) is None:
            raise ClusterError(f"{task} is off the cluster's network already")
        self._docker("network", "disconnect", "--force", name, container)
        self._undo.append((*self._at, "network", "connect", "--alias", task, name, container))

    def lose(self, task: str) -> None:
        """Kill the container by `docker kill`, after which the engine does not restart it."""
        container = self._container(task)
        self._docker("kill", container)
        self._undo.append((*self._at, "start", container))

    def slow(self, task: str) -> None:
        container = self._container(task)
        self._docker("update", "--cpus", str(SLOWED_SHARE), container)
        self._undo.append((*self._at, "update", "--cpus", str(os.cpu_count() or 1), container))

    def oom(self, task: str) -> None:
        """Limit the container's memory to a little more than it uses, and start a process in it that takes the rest."""
        container, program = self._container(task), self.processes(task)["program"]["pid"]
        # The file of cgroup v2, otherwise that of v1.
        files = "/sys/fs/cgroup/memory.current /sys/fs/cgroup/memory/memory.usage_in_bytes"
        used = int(self._docker("exec", container, "sh", "-c", f"cat {files} 2>/dev/null | head -n 1"))
        before = self._docker("inspect", "--format", "{{.HostConfig.Memory}}", container)
        limit = used + 2**27
        self._docker("update", "--memory", str(limit), "--memory-swap", str(limit), container)
        self._undo.append((*self._at, "update", "--memory", before, "--memory-swap", before, container))
        # The exit code does not matter, only the program's end.
        command = ("python", "-c", MEMORY_EATER.read_text(), str(program), str(limit // 2**24 + 16))
        self._ask("exec", container, *command, timeout_s=60)

    def undo(self, task: str) -> None:
        while self._undo:
            engine.ask(*self._undo.pop())
        super().undo(task)

    def _container(self, task: str) -> str:
        self._at = self._engine(task)
        filters = [word for condition in self._filters(task) for word in ("--filter", condition)]
        if not (ids := self._docker("ps", "--quiet", *filters)):
            raise ClusterError(f"{task} has no container that runs; `docker ps --all` shows those that do not")
        return ids.split()[0]

    def _engine(self, task: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the options with which Docker's client reaches a task's engine; none for the default engine."""
        return ()

    def _filters(self, task: str) -> list[str]:
        return [f"label=com.docker.compose.project={project(self._run.path)}", f"label={TASK_LABEL}={task}"]

    def _ask(self, *words: str, timeout_s: float = engine.ANSWER_TIMEOUT_S) -> tuple[int, str]:
        return engine.ask(*self._at, *words, timeout_s=timeout_s)

    def _docker(self, *words: str) -> str:
        code, output = self._ask(*words, timeout_s=30)
        if code:
            raise ClusterError(f"docker {' '.join(words[:2])}: {' '.join(output.split())}")
        return output


class ContainerRuntime(Runtime):
    """Base class of the Compose and Swarm runtimes."""

    limits_memory = True
    python = images.PYTHON

    def seen(self, payload: Payload) -> Payload:
        return payload.mounted()

    def image(self, work: Workload) -> dict[str, Any]:
        return images.inspect_image(images.train_image(work.accelerator))

    def render(self, work: Workload) -> dict[str, Any]:
        check_readable(work.payload)
        mounted = [folder for folder, _ in work.payload.mounts()]
        provenance.check_hidden([work.run.path.parent, work.data_dir, *mounted])
        return {"x-runtime": self.name, **self.describe(work)}

    @abstractmethod
    def describe(self, work: Workload) -> dict[str, Any]:
        """Return the run's services in the format of Compose files."""

    def prepare(self, work: Workload, sh: Shell, *, renew: bool = True) -> None:
        images.build_images(sh, work.accelerator, renew=renew)

    def commands(self, work: Workload) -> list[str]:
        return [*images.pending_commands(work.accelerator), *self.start_commands(work)]

    @abstractmethod
    def start_commands(self, work: Workload) -> list[str]:
        """Return the commands that start the tasks."""

    def start(self, work: Workload, sh: Shell) -> None:
        let_tasks_read(work.run.path.parent, work.data_dir)
        give_to_tasks(work.run.path)
        if work.payload.script:
            work.run.scratch.mkdir(parents=True, exist_ok=True)
            give_to_tasks(work.run.scratch)
        owner.create_owner(work.run, self.name)
        for command in self.start_commands(work):
            sh(command)


class Compose(ContainerRuntime):
    """The runtime of Docker containers, through `docker compose`."""

    name = "docker"
    tasks = "containers"
    automatic = True
    board = "docker"
    injector = ContainerFaults
    describe = staticmethod(render_overlay)

    def probe(self) -> engine.Availability:
        return engine.probe()

    def examine(self) -> list[Finding]:
        if (answer := self.probe()).ready:
            return [Finding("docker", "ok", answer.detail)]
        return [Finding("docker", "warning", answer.detail, f"{answer.fix}; until then runs are local")]

    def memory(self, requested: str, num_tasks: int) -> resources.Memory:
        total_bytes = engine.memory_bytes()
        share_bytes = int(total_bytes * resources.SHARED) // num_tasks
        return resources.Memory(requested, resources.parse_memory(requested) or share_bytes, total_bytes)

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> resources.Network:
        if (requested or previous) != resources.EGRESS:
            return super().network(requested, previous, way_out=way_out, serves=serves)
        warning = f"{resources.EXPOSED}: this machine has an address in the tasks' network (--network egress)"
        return resources.Network(resources.EGRESS, resources.EGRESS, warning if serves else "")

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # limits, not free memory, count
        work.memory.check(len(work.cluster.tasks))
        if work.gpus.ids:
            nvidia.check_engine()

    def start_commands(self, work: Workload) -> list[str]:
        return [overlay_command(work.run.compose, *UP, *(task.name for task in work.cluster.tasks))]

    def alive(self, run: RunFolder) -> bool:
        return is_running(project(run.path))

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        # By the engine's labels, not by the overlay: tasks can rewrite the overlay, and could make Compose act
        # on the host or on other projects.
        words = ("down", "--timeout", str(grace_s), "--volumes", "--remove-orphans")
        command = shlex.join([*COMPOSE, "--project-name", project(run.path), *words])
        run_ending(command, sh, f"{run.name}: in containers, which may continue")

    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        """Return the runs with a container or network in the engine, by labels: the run folder may be gone."""
        shown = f'{{{{.Label "com.docker.compose.project"}}}}\t{{{{.Label "{RUN_LABEL}"}}}}'
        known = {project(runs_dir / name): name for name in names}
        left = set()
        for words in (["network", "ls"], ["ps", "--all"]):
            code, text = engine.ask(*words, "--format", shown)
            if code:
                raise PrerequisiteError(f"{engine.probe().detail}; start the engine")
            for line in text.splitlines():
                labelled, _, name = line.partition("\t")
                if labelled in known:
                    left.add(known[labelled])
                elif name == Path(name).name and project(runs_dir / name) == labelled:
                    left.add(name)
        return left
