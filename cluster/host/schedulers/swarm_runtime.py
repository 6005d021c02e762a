"""The runtime of Docker Swarm stacks: a service for each task, on hosts that the Swarm chooses.

The engine of Docker's client (DOCKER_HOST) must be that of a manager. Everything runs by commands that `--dry` prints,
to paste; `docker stack deploy` reads the stack from the run's `compose.json`. The first process of each container is
`cluster/agent/schedulers/service.py`.

A service has the settings of a Compose service, except those that a Swarm does not support: `security_opt` (set
`no-new-privileges` in each engine's daemon.json) and a swap limit. `swarm_stack.yaml` has the part common to all tasks.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from invoke.util import yaml  # invoke brings PyYAML along, for its own files

from cluster.contract import settings
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Role, Task
from cluster.host.image import engine, images
from cluster.host.image.engine import Availability
from cluster.host.runtime import compose_runtime, resources
from cluster.host.runtime.base import Finding, ScheduledRuntime, Shell, Workload
from cluster.host.runtime.resources import ENCRYPTED, Job, Memory, Network, parse_memory
from cluster.system.errors import ClusterError, PrerequisiteError, TimedOut
from cluster.system.messages import last_output_line
from cluster.system.waiting import wait_until

ENGINE_LABEL = "tf-cluster.engine"
"""The label of a node with its engine's address for `docker --host`, such as ssh://host."""
GPU = "NVIDIA-GPU"
"""The name of GPUs in the engines' `node-generic-resources`, as in NVIDIA's and Docker's documentation."""
FORMAT = "3.13"
"""The newest format that `docker stack deploy` supports."""
WAIT_S = "300"
"""The timeout of the rendezvous: a Swarm notices the loss of a host only after 15 s."""
SCRATCH_BYTES, SHM_BYTES = 2**30, 2**30
START_S = 60.0
"""How long a command waits for the Swarm to place and start every task."""
UNPLACED_S = 20.0
"""After this long a task without a host is an error: a Swarm decides within a second, and retries."""
END_S = 90.0
"""Timeout for a stack to end, whose tasks get 60 s to save."""
POLL_S = 0.5
FIXES = {
    "No such image": "bring the image there; docs/guides/swarm.md says how",
    "does not exist": "put RUNS_DIR and DATA_DIR into folders that every host has under the same path",
}
"""The fix of an error with which a task is rejected, by a part of its text."""


@dataclass(frozen=True)
class SwarmNode:
    """A host of the Swarm.

    Attributes:
        is_manager: whether its engine is the one to which commands are sent.
        engine: where its engine is reached; empty where its label does not say.
        obstacle: what keeps it from taking tasks, such as `down` or `drain`; empty where nothing does.
    """

    name: str
    is_manager: bool
    engine: str
    obstacle: str


def list_nodes() -> list[SwarmNode]:
    """Return the hosts of the Swarm."""
    manager = ask_manager("info", "--format", "{{.Swarm.NodeID}}")
    ids = ask_manager("node", "ls", "--quiet").split()
    nodes = []
    for value in json.loads(ask_manager("node", "inspect", *ids)):
        spec, described = value.get("Spec", {}), value.get("Description", {})
        state, availability = value.get("Status", {}).get("State", ""), spec.get("Availability", "")
        obstacle = state if state != "ready" else availability.removeprefix("active")
        address = (spec.get("Labels") or {}).get(ENGINE_LABEL, "")
        nodes.append(SwarmNode(described.get("Hostname", ""), value["ID"] == manager, address, obstacle))
    return nodes


def ask_manager(*words: str) -> str:
    """Return the answer of the manager's engine."""
    code, text = engine.ask(*words, timeout_s=30.0)
    if code:
        raise PrerequisiteError(f"docker {' '.join(words[:2])}: {' '.join(text.split())[:300]}")
    return text


@dataclass(frozen=True)
class PlacedTask:
    """A task of a stack, as reported by the Swarm."""

    service: str
    """The name of the task's service, without the stack's name."""
    state: str
    """The Swarm's state, such as `running`, `rejected` or `complete`."""
    node: str
    error: str


def stack_tasks(stack: str, *states: str) -> list[PlacedTask]:
    """Return the tasks of a stack whose desired state is one of `states`, by default all."""
    filters = [word for state in states for word in ("--filter", f"desired-state={state}")]
    text = ask_manager("stack", "ps", "--no-trunc", "--format", "{{json .}}", *filters, stack)
    tasks = []
    for value in (json.loads(line) for line in text.splitlines() if line.startswith("{")):
        service = value["Name"].removeprefix(f"{stack}_").split(".")[0]
        tasks.append(PlacedTask(service, value["CurrentState"].split()[0].lower(), value["Node"], value["Error"]))
    return tasks


def stack_parts(what: str, stack: str) -> list[str]:
    """Return the ids of a stack's networks or secrets."""
    return ask_manager(what, "ls", "--quiet", "--filter", f"label=com.docker.stack.namespace={stack}").split()


def carry_commands(image: str) -> tuple[list[str], list[str]]:
    """Return the commands that copy an image to hosts that lack it, and the hosts whose engines are unknown."""
    here = engine.ask("image", "inspect", "--format={{.Id}}", image)[1]
    commands, unknown = [], []
    for node in list_nodes():
        if node.is_manager or node.obstacle:
            continue
        if not node.engine:
            unknown.append(node.name)
        elif engine.ask("--host", node.engine, "image", "inspect", "--format={{.Id}}", image) != (0, here):
            load = shlex.join(["docker", "--host", node.engine, "load", "--quiet"])
            commands.append(f"docker save {shlex.quote(image)} | {load}")
    return commands, unknown


def stack_name(run_dir: Any) -> str:
    """Return the name of a run's stack: the run's Compose project, shortened for the names of services."""
    project = compose_runtime.project(run_dir)
    return f"{project[:-9][:40].rstrip('-_')}{project[-9:]}"


def render_stack(work: Workload) -> dict[str, Any]:
    """Return the stack of a run."""
    labels = {compose_runtime.RUN_LABEL: work.run.name}
    network: dict[str, Any] = {"driver": "overlay", "internal": not work.payload.script, "labels": labels}
    if work.network.name == ENCRYPTED:
        network["driver_opts"] = {"encrypted": "true"}
    rendered: dict[str, Any] = {
        "version": FORMAT,
        "services": {task.name: _service(work, task) for task in work.cluster.tasks},
        "networks": {"cluster": network},
    }
    if secrets := work.payload.caller_variables:
        stack = stack_name(work.run.path)
        rendered["secrets"] = {name: {"external": True, "name": f"{stack}-{name}"} for name in secrets}
    return dict(compose_runtime.literal(rendered))


def _service(work: Workload, task: Task) -> dict[str, Any]:
    job, secrets = work.job, work.payload.caller_variables
    gpus = int(job.gpus_per_task or 0) if task.role in (Role.CHIEF, Role.WORKER) else 0
    service = compose_runtime.describe_task(work, task)
    environment = service["environment"]
    for name in secrets:  # the Swarm stores their values
        del environment[name]
    if not settings.is_set("RENDEZVOUS_TIMEOUT_S"):
        environment["RENDEZVOUS_TIMEOUT_S"] = WAIT_S
    if gpus:
        environment |= {"GPUS_GIVEN": str(gpus), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        environment |= {"NCCL_SOCKET_IFNAME": compose_runtime.NETWORK_INTERFACE}
    else:
        environment |= compose_runtime.NO_GPU
    own = "/var/tmp" if work.payload.script else "/tmp"  # noqa: S108  # a script's /tmp is a folder of the run
    for name in ("HOME", "TMPDIR"):
        environment.setdefault(name, own)
    scratch = {own: SCRATCH_BYTES}
    if gpus:  # the engine's default of 64 MB is too small for NCCL's buffers
        scratch["/dev/shm"] = SHM_BYTES  # noqa: S108
    service["volumes"] += [{"type": "tmpfs", "target": path, "tmpfs": {"size": size}} for path, size in scratch.items()]
    limits: dict[str, Any] = {"pids": 4096}
    reservations: dict[str, Any] = {}
    if work.memory.task_bytes:
        limits["memory"] = reservations["memory"] = str(work.memory.task_bytes)
    if job.cpus_per_task:
        limits["cpus"] = reservations["cpus"] = job.cpus_per_task
    if gpus:
        reservations["generic_resources"] = [{"discrete_resource_spec": {"kind": GPU, "value": gpus}}]
    service |= yaml.safe_load(Path(__file__).with_name("swarm_stack.yaml").read_text())
    service["deploy"] |= {
        "labels": service["labels"],
        "placement": {"constraints": constraints(job)},
        "resources": {"limits": limits} | ({"reservations": reservations} if reservations else {}),
    }
    if secrets:
        service["secrets"] = [{"source": name, "target": name} for name in secrets]
    if gpus:
        service["ulimits"] = dict(compose_runtime.GPU_LIMITS)
    return service


def constraints(job: Job) -> list[str]:
    """Return the placement constraints of a job, in Docker's syntax."""
    return [re.sub(r"\s*([!=]=)\s*", r"\1", part.strip()) for part in job.constraint.split(",") if part.strip()]


class SwarmFaults(compose_runtime.ContainerFaults):
    """Injects faults into the containers of a stack."""

    storm = frozenset({"kill", "pause", "slow", "corrupt"})
    refusals: ClassVar = {
        "partition": "a service's container cannot be connected again; cut off its host, or use --runtime docker",
        "lose": "the Swarm would start it again; cut off or drain its host, or use --runtime docker",
        "oom": "a limit of a service is not changed in place; use a run of --runtime docker",
    }

    def _engine(self, task: str) -> tuple[str, ...]:
        service = f"{stack_name(self._run.path)}_{task}"
        shown = ask_manager("service", "ps", "--filter", "desired-state=running", "--format", "{{.Node}}", service)
        on = shown.splitlines()[0] if shown else ""
        if (node := next((each for each in list_nodes() if each.name == on), None)) is None:
            raise ClusterError(f"{task} runs on no host of the Swarm now; `docker service ps {service}` says why")
        if node.is_manager:
            return ()
        if not node.engine:
            fix = f"`docker node update --label-add {ENGINE_LABEL}=ssh://{node.name} {node.name}`"
            raise ClusterError(f"{task} is on {node.name}, whose engine is not known; {fix}")
        return ("--host", node.engine)

    def _filters(self, task: str) -> list[str]:
        return [f"label=com.docker.swarm.service.name={stack_name(self._run.path)}_{task}"]


class Swarm(compose_runtime.ContainerRuntime, ScheduledRuntime):
    """Services of a Docker Swarm, whose hosts share the folders of runs and data."""

    name = "swarm"
    tasks = "services of a Swarm"
    look_s = 2.0
    way_back = "set DOCKER_HOST to a manager's engine"
    job_options = frozenset({"constraint", "cpus_per_task", "gpus_per_task"})
    injector = SwarmFaults
    describe = staticmethod(render_stack)

    def probe(self) -> Availability:
        swarm, text = engine.ask_info("Swarm")
        if not swarm:
            return engine.unavailable(f"no Docker Engine answers ({last_output_line(text)})")
        if swarm.get("LocalNodeState") != "active":
            fix = "`docker swarm init`, or set DOCKER_HOST to a manager's"
            return Availability(False, "this Docker Engine is in no Swarm", fix)
        if not swarm.get("ControlAvailable"):
            return Availability(False, "this Docker Engine is a worker of its Swarm", self.way_back)
        return Availability(True, f"a Swarm of {swarm.get('Nodes', 1)}")

    def examine(self) -> list[Finding]:
        if not self.probe().ready:
            return []
        found = list_nodes()
        if away := [f"{node.name} ({node.obstacle})" for node in found if node.obstacle]:
            fix = "docker node update --availability active"
            return [Finding("swarm", "warning", f"no tasks on {', '.join(away)}", fix)]
        return [Finding("swarm", "ok", ", ".join(node.name for node in found))]

    def memory(self, requested: str, num_tasks: int) -> Memory:  # noqa: ARG002  # on other machines
        return Memory(requested, parse_memory(requested))

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:
        typed = requested or previous
        resources.check_network(typed, resources.PRIVATE, ENCRYPTED)
        if not serves or (typed == ENCRYPTED and not way_out):
            return Network(typed or resources.PRIVATE, typed)
        open_to = "all who are on the network between the hosts (UDP port 4789) reach them"
        if typed == ENCRYPTED:
            open_to = f"all who are on one of the hosts reach them, because the tasks are {way_out}"
        warning = f"{resources.UNPROTECTED} {open_to}"
        use = "; --network encrypted closes that, or a network that only the hosts are in" if not way_out else ""
        return Network(typed or resources.PRIVATE, typed, f"{warning}{use}: see docs/guides/swarm.md")

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # the Swarm checks the free resources
        """Check that some host accepts tasks; only the Swarm knows which hosts have the reserved resources."""
        if all(node.obstacle for node in list_nodes()):
            raise PrerequisiteError("no host of the Swarm accepts tasks; `docker node ls` says why")

    def prepare(self, work: Workload, sh: Shell, *, renew: bool = True) -> None:
        super().prepare(work, sh, renew=renew)
        image = images.train_image(work.accelerator)
        commands, unknown = carry_commands(image)
        for command in commands:
            sh(command)
        if unknown:
            host = unknown[0]
            print(
                f"whether {', '.join(unknown)} has {image} is not known; bring it there with `docker save {image} | "
                f"docker --host ssh://{host} load`, or have `up` do that: `docker node update --label-add "
                f"{ENGINE_LABEL}=ssh://{host} {host}`",
                file=sys.stderr,
            )

    def commands(self, work: Workload) -> list[str]:
        build, deploy = images.pending_commands(work.accelerator), self.start_commands(work)
        return [*build, *carry_commands(images.train_image(work.accelerator))[0], *deploy]

    def start(self, work: Workload, sh: Shell) -> None:
        """Deploy the stack, and wait until every task is placed."""
        super().start(work, sh)
        _await_places(stack_name(work.run.path), {task.name for task in work.cluster.tasks})

    def start_commands(self, work: Workload) -> list[str]:
        name = stack_name(work.run.path)
        label = f"--label=com.docker.stack.namespace={name}"  # removed with the stack
        secret = shlex.join(["docker", "secret", "create", label])
        create = [f'printf %s "${each}" | {secret} {name}-{each} -' for each in work.payload.caller_variables]
        # Without resolution, every host uses the image of this name, which was copied there or which it pulls.
        options = ["--detach=true", "--resolve-image=never", f"--compose-file={work.run.compose}"]
        return [*create, shlex.join(["docker", "stack", "deploy", *options, name])]

    def scheduled_name(self, run: RunFolder) -> str:
        return stack_name(run.path)

    def has_tasks(self, name: str) -> bool:
        try:
            return bool(stack_tasks(name, "running", "ready"))
        except PrerequisiteError:  # the stack is unknown, or no Swarm answers
            return not self.probe().ready

    def scheduled(self) -> Collection[str]:
        return ask_manager("stack", "ls", "--format", "{{.Name}}").split()

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:  # noqa: ARG002  # the stack says how long
        if not (available := self.probe()).ready:
            why = f"{available.detail}; {available.fix}"
            raise PrerequisiteError(f"{run.name}: on a Swarm, where it may continue: {why}")
        name = stack_name(run.path)
        if name in self.scheduled():
            sh(shlex.join(["docker", "stack", "rm", "--detach=false", name]))
        for secret in stack_parts("secret", name):  # left by a start that failed before the deployment
            sh(shlex.join(["docker", "secret", "rm", secret]))
        if not wait_until(lambda: not stack_parts("network", name), END_S, POLL_S):
            raise TimedOut(f"the network of {run.name} does not end; `docker network inspect --verbose` says why")


def _await_places(name: str, expected: Collection[str]) -> None:
    """Wait until every task has a host that starts it, or for `START_S`."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < START_S:
        placed = set()
        for task in stack_tasks(name):
            if task.state == "rejected":
                fixes = [fix for part, fix in FIXES.items() if part in task.error]
                fix = fixes[0] if fixes else "`docker service ps --no-trunc` says more"
                raise PrerequisiteError(f"{task.service} cannot start on {task.node}: {task.error}; {fix}")
            if task.state == "pending" and task.error and passed_s > UNPLACED_S:
                raise PrerequisiteError(f"no host can take {task.service}: {task.error}; request less, or add hosts")
            if task.state in ("starting", "running", "complete", "failed"):
                placed.add(task.service)
        if placed >= set(expected):
            return
        time.sleep(POLL_S)
