"""The runtime of Docker containers, through `docker compose`; `compose_services.py` describes the services."""

import json
import os
import shlex
from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.contract.run import owner, provenance
from cluster.contract.run.folder import RunFolder
from cluster.host import nvidia
from cluster.host.image import engine, images
from cluster.host.image.engine import Availability
from cluster.host.runtime import compose_services, resources
from cluster.host.runtime.base import SLOWED_SHARE, FaultInjector, Finding, Runtime, Shell, Workload
from cluster.host.runtime.compose_services import RUN_LABEL, project
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import Memory, Network
from cluster.system import memory
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.paths import ROOT

PAUSE_TRIES = 5

MEMORY_EATER = ROOT / "docker" / "eat_memory.py"


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
        container = self._container(task)
        self._ask("exec", container, "sh", "-c", f"kill -{number} {pids}")

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
        name = next((name for name in networks if name.endswith("_cluster")), None)
        if name is None:
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
        # The file of cgroup v2, else that of v1.
        files = "/sys/fs/cgroup/memory.current /sys/fs/cgroup/memory/memory.usage_in_bytes"
        used = int(self._docker("exec", container, "sh", "-c", f"cat {files} 2>/dev/null | head -n 1"))
        limited = int(self._docker("inspect", "--format", "{{.HostConfig.Memory}}", container))
        limit = used + 2**27
        self._docker("update", "--memory", str(limit), "--memory-swap", str(limit), container)
        before = str(limited or memory.available_bytes() + limit)  # a limit cannot be removed again
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
        ids = self._docker("ps", "--quiet", *filters)
        if not ids:
            raise ClusterError(f"{task} has no container that runs; `docker ps --all` shows those that do not")
        return ids.split()[0]

    def _engine(self, task: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the options with which Docker's client reaches a task's engine; none for the default engine."""
        return ()

    def _filters(self, task: str) -> list[str]:
        of_run = f"label=com.docker.compose.project={project(self._run.path)}"
        return [of_run, f"label={compose_services.TASK_LABEL}={task}"]

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
        compose_services.check_readable(work.payload)
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
        compose_services.let_tasks_read(work.run.path.parent, work.data_dir)
        compose_services.give_to_tasks(work.run.path)
        if work.payload.script:
            work.run.scratch.mkdir(parents=True, exist_ok=True)
            compose_services.give_to_tasks(work.run.scratch)
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

    def probe(self) -> Availability:
        return engine.probe()

    def examine(self) -> list[Finding]:
        answer = self.probe()
        if answer.ready:
            return [Finding("docker", "ok", answer.detail)]
        return [Finding("docker", "warning", answer.detail, f"{answer.fix}; until then runs are local")]

    def memory(self, requested: str, num_tasks: int) -> Memory:
        total_bytes = engine.memory_bytes()
        share_bytes = int(total_bytes * resources.SHARED) // num_tasks
        return Memory(requested, resources.parse_memory(requested) or share_bytes, total_bytes)

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:
        if (requested or previous) != resources.EGRESS:
            return super().network(requested, previous, way_out=way_out, serves=serves)
        warning = f"{resources.EXPOSED}: this machine has an address in the tasks' network (--network egress)"
        return Network(resources.EGRESS, resources.EGRESS, warning if serves else "")

    def describe(self, work: Workload) -> dict[str, Any]:
        return compose_services.render_overlay(work)

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # limits, not free memory, count
        work.memory.check(len(work.cluster.tasks))
        if work.gpus.ids:
            nvidia.check_engine()

    def start_commands(self, work: Workload) -> list[str]:
        names = [task.name for task in work.cluster.tasks]
        return [compose_services.overlay_command(work.run.compose, *compose_services.UP, *names)]

    def alive(self, run: RunFolder) -> bool:
        return compose_services.is_running(project(run.path))

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        # By the engine's labels, not by the overlay: tasks can rewrite the overlay, and could thereby make Compose act
        # on the host or on other projects.
        words = ("down", "--timeout", str(grace_s), "--volumes", "--remove-orphans")
        command = shlex.join([*compose_services.COMPOSE, "--project-name", project(run.path), *words])
        compose_services.run_ending(command, sh, f"{run.name}: in containers, which may continue")

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
