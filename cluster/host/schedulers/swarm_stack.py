"""A Docker Swarm: its hosts, and the stack of a run, which is the file that `docker stack deploy` reads.

A service has the settings of Compose's, but for those that it cannot have: `security_opt` (set `no-new-privileges` in
each engine's daemon.json) and a limit of swap. `swarm_stack.yaml` holds what is the same for every task.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invoke.util import yaml  # invoke brings PyYAML along, for its own files

from cluster.contract import settings
from cluster.contract.spec import Role, Task
from cluster.host.image import engine
from cluster.host.runtime import compose_services
from cluster.host.runtime.base import Workload
from cluster.host.runtime.compose_services import RUN_LABEL
from cluster.host.runtime.resources import ENCRYPTED, Job
from cluster.system.errors import PrerequisiteError

ENGINE_LABEL = "tf-cluster.engine"
"""The label of a node with the address of its engine, such as ssh://host, as `docker --host` takes it."""
GPU = "NVIDIA-GPU"
"""What engines call their GPUs in `node-generic-resources`, as in NVIDIA's and Docker's documentation."""


@dataclass(frozen=True)
class SwarmNode:
    """A host of the Swarm.

    Attributes:
        name: its host name.
        is_manager: whether its engine is the one that commands talk to.
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
    return [_node(value, manager) for value in json.loads(ask_manager("node", "inspect", *ids))]


def _node(value: dict[str, Any], manager: str) -> SwarmNode:
    spec, described = value.get("Spec", {}), value.get("Description", {})
    state, availability = value.get("Status", {}).get("State", ""), spec.get("Availability", "")
    obstacle = state if state != "ready" else availability
    if obstacle == "active":
        obstacle = ""
    address = (spec.get("Labels") or {}).get(ENGINE_LABEL, "")
    return SwarmNode(described.get("Hostname", ""), value["ID"] == manager, address, obstacle)


def ask_manager(*words: str) -> str:
    """Return the answer of the manager's engine."""
    code, text = engine.ask(*words, timeout_s=30.0)
    if code:
        raise PrerequisiteError(f"docker {' '.join(words[:2])}: {' '.join(text.split())[:300]}")
    return text


@dataclass(frozen=True)
class PlacedTask:
    """A task of a stack, as the Swarm sees it."""

    service: str
    """Whose it is, without the stack's name."""
    state: str
    """Such as `running`, `rejected` or `complete`."""
    node: str
    error: str


def stack_tasks(stack: str, *states: str) -> list[PlacedTask]:
    """Return the tasks of a stack that are to be in one of these states; all of them if none is named."""
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
    """Return the commands that bring an image to hosts that lack it, and the hosts whose engines are not known."""
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


FORMAT = "3.13"
"""The newest that `docker stack deploy` reads."""
WAIT_S = "300"
"""How long tasks wait for the others: a Swarm notices after 15 s that a host is gone."""
SCRATCH_BYTES, SHM_BYTES = 2**30, 2**30


def stack_name(run_dir: Any) -> str:
    """Return the name of a run's stack: that of its Compose project, short enough for the names of services."""
    project = compose_services.project(run_dir)
    return f"{project[:-9][:40].rstrip('-_')}{project[-9:]}"


def secret_name(stack: str, variable: str) -> str:
    """Return the name in the Swarm of the secret with a variable's value."""
    return f"{stack}-{variable}"


def render_stack(work: Workload) -> dict[str, Any]:
    """Return the stack of a run."""
    labels = {RUN_LABEL: work.run.name}
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
        rendered["secrets"] = {name: {"external": True, "name": secret_name(stack, name)} for name in secrets}
    literal: dict[str, Any] = compose_services.literal(rendered)
    return literal


def _service(work: Workload, task: Task) -> dict[str, Any]:
    job, secrets = work.job, work.payload.caller_variables
    gpus = int(job.gpus_per_task or 0) if task.role in (Role.CHIEF, Role.WORKER) else 0
    service = compose_services.describe_task(work, task)
    environment = service["environment"]
    for name in secrets:  # the Swarm keeps their values
        del environment[name]
    if not settings.is_set("RENDEZVOUS_TIMEOUT_S"):
        environment["RENDEZVOUS_TIMEOUT_S"] = WAIT_S
    if gpus:
        environment |= {"GPUS_GIVEN": str(gpus), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        environment |= {"NCCL_SOCKET_IFNAME": compose_services.NETWORK_INTERFACE}
    else:
        environment |= compose_services.NO_GPU
    service["volumes"] += _scratch(work, with_gpus=gpus > 0)
    service |= yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    service["deploy"] |= {
        "labels": service["labels"],
        "placement": {"constraints": constraints(job)},
        "resources": _service_resources(work, gpus),
    }
    if secrets:
        service["secrets"] = [{"source": name, "target": name} for name in secrets]
    if gpus:
        service["ulimits"] = dict(compose_services.GPU_LIMITS)
    return service


def constraints(job: Job) -> list[str]:
    """Return which nodes take tasks, in Docker's words."""
    return [re.sub(r"\s*([!=]=)\s*", r"\1", part.strip()) for part in job.constraint.split(",") if part.strip()]


def _service_resources(work: Workload, gpus: int) -> dict[str, Any]:
    limits: dict[str, Any] = {"pids": 4096}
    reservations: dict[str, Any] = {}
    if work.memory.task_bytes:
        limits["memory"] = reservations["memory"] = str(work.memory.task_bytes)
    if cpus := work.job.cpus_per_task:
        limits["cpus"] = reservations["cpus"] = cpus
    if gpus:
        reservations["generic_resources"] = [{"discrete_resource_spec": {"kind": GPU, "value": gpus}}]
    return {"limits": limits, **({"reservations": reservations} if reservations else {})}


def _scratch(work: Workload, *, with_gpus: bool) -> list[dict[str, Any]]:
    """Return the folders in memory that a task may write; a script's /tmp is a folder of the run."""
    folder = "/var/tmp" if work.payload.script else "/tmp"  # noqa: S108
    found = [{"type": "tmpfs", "target": folder, "tmpfs": {"size": SCRATCH_BYTES}}]
    if with_gpus:  # the engine's 64 MB are too few for NCCL's buffers
        found.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": SHM_BYTES}})  # noqa: S108
    return found
