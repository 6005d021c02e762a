"""The hosts of a Swarm: which there are, which engine each has, and how they come to an image that they cannot pull."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.host.image import engine
from cluster.system.errors import PrerequisiteError

ENGINE_LABEL = "tf-cluster.engine"
"""The label of a node with the address of its engine, such as ssh://host, as `docker --host` takes it."""


GPU = "NVIDIA-GPU"
"""What engines call their GPUs in `node-generic-resources`, as in NVIDIA's and Docker's documentation."""
LABELS = ("node.labels.", "engine.labels.")


@dataclass(frozen=True)
class Node:
    """A host of the Swarm.

    Attributes:
        id: in the Swarm.
        name: its host name.
        usable: whether it is up and takes tasks.
        own: whether its engine is the one that commands talk to.
        engine: where its engine is reached; empty where its label does not say.
        why: what keeps it from taking tasks, such as `down` or `drain`.
        attributes: what a constraint can name of it, such as `node.labels.rack`.
        resources: how much it has of what tasks reserve, such as `cpus`; only what it says.
    """

    id: str
    name: str
    usable: bool
    own: bool
    engine: str
    why: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)

    def meets(self, constraint: str) -> bool:
        """Whether the Swarm may place tasks here under a constraint, as far as that can be said from here."""
        name, differs, value = re.split(r"([!=]=)", constraint, maxsplit=1)
        if name not in self.attributes and not name.startswith(LABELS):
            return True
        return (self.attributes.get(name, "").casefold() == value.casefold()) == (differs == "==")

    def has(self, reserved: Mapping[str, float]) -> bool:
        """Whether a task that reserves this could ever run here."""
        return all(amount <= self.resources.get(what, amount) for what, amount in reserved.items())


def probe() -> tuple[bool, str, str]:
    """Return whether the engine manages a Swarm, what it is or why it does not, and what to do then."""
    code, text = engine.ask("info", "--format", "{{json .Swarm}}")
    try:
        swarm = json.loads(text.splitlines()[-1]) if code == 0 and text else {}
    except ValueError:
        swarm = {}
    if code or not swarm:
        detail = f"no Docker Engine answers ({text.splitlines()[-1] if text else 'no output'})"
        return False, detail, engine.fix(detail)
    if swarm.get("LocalNodeState") != "active":
        return False, "this Docker Engine is in no Swarm", "`docker swarm init`, or set DOCKER_HOST to a manager's"
    if not swarm.get("ControlAvailable"):
        return False, "this Docker Engine is a worker of its Swarm", "set DOCKER_HOST to a manager's engine"
    return True, f"a Swarm of {swarm.get('Nodes', 1)}", ""


def nodes() -> list[Node]:
    """Return the hosts of the Swarm.

    Raises:
        PrerequisiteError: the engine does not say.
    """
    own = ask("info", "--format", "{{.Swarm.NodeID}}")
    ids = ask("node", "ls", "--quiet").split()
    return [_node(each, own) for each in json.loads(ask("node", "inspect", *ids))]


def _node(value: dict[str, Any], own: str) -> Node:
    spec, described = value.get("Spec", {}), value.get("Description", {})
    state, availability = value.get("Status", {}).get("State", ""), spec.get("Availability", "")
    why = "" if (state, availability) == ("ready", "active") else (state if state != "ready" else availability)
    labels, engine_labels = spec.get("Labels") or {}, described.get("Engine", {}).get("Labels") or {}
    name = described.get("Hostname", "")
    attributes = {"node.id": value["ID"], "node.hostname": name, "node.role": spec.get("Role", "")}
    attributes |= {f"{LABELS[0]}{key}": text for key, text in labels.items()}
    attributes |= {f"{LABELS[1]}{key}": text for key, text in engine_labels.items()}
    resources = _resources(described.get("Resources", {}))
    is_own = value["ID"] == own
    return Node(value["ID"], name, not why, is_own, labels.get(ENGINE_LABEL, ""), why, attributes, resources)


def _resources(value: dict[str, Any]) -> dict[str, float]:
    if not value:
        return {}
    kinds = [
        each.get("NamedResourceSpec") or each["DiscreteResourceSpec"] for each in value.get("GenericResources", [])
    ]
    gpus = sum(each["Value"] if isinstance(each["Value"], int) else 1 for each in kinds if each["Kind"] == GPU)
    return {"cpus": value["NanoCPUs"] / 1e9, "memory": value["MemoryBytes"], "GPUs": gpus}


def ask(*words: str, timeout_s: float = 30.0) -> str:
    """Return what the manager's engine answers.

    Raises:
        PrerequisiteError: it does not, or refuses.
    """
    code, text = engine.ask(*words, timeout_s=timeout_s)
    if code:
        raise PrerequisiteError(f"docker {' '.join(words[:2])}: {' '.join(text.split())[:300]}")
    return text


@dataclass(frozen=True)
class PlacedTask:
    """A task of a stack, as the Swarm sees it.

    Attributes:
        service: whose it is, without the stack's name.
        state: such as `running`, `rejected` or `complete`.
        node: the host; empty where it has none.
        error: what the Swarm says of it.
    """

    service: str
    state: str
    node: str
    error: str


def tasks(stack: str, *states: str) -> list[PlacedTask]:
    """Return the tasks of a stack that are to be in one of these states; all of them if none is named.

    Raises:
        PrerequisiteError: the Swarm does not say, as where there is no such stack.
    """
    filters = [word for state in states for word in ("--filter", f"desired-state={state}")]
    text = ask("stack", "ps", "--no-trunc", "--format", "{{json .}}", *filters, stack)
    return [_task(json.loads(line), stack) for line in text.splitlines() if line.startswith("{")]


def _task(value: dict[str, str], stack: str) -> PlacedTask:
    service = value["Name"].removeprefix(f"{stack}_").split(".")[0]
    return PlacedTask(service, value["CurrentState"].split()[0].lower(), value["Node"], value["Error"])


def stacks() -> list[str]:
    """Return the names of all stacks."""
    return ask("stack", "ls", "--format", "{{.Name}}").split()


def parts(what: str, stack: str) -> list[str]:
    """Return the ids of a stack's networks or secrets."""
    return ask(what, "ls", "--quiet", "--filter", f"label=com.docker.stack.namespace={stack}").split()


def carry(image: str) -> tuple[list[str], list[str]]:
    """Return the commands that bring an image to hosts that lack it, and the hosts whose engines are not known."""
    here = engine.ask("image", "inspect", "--format={{.Id}}", image)[1]
    commands, unknown = [], []
    for node in nodes():
        if node.own or not node.usable:
            continue
        if not node.engine:
            unknown.append(node.name)
        elif engine.ask("--host", node.engine, "image", "inspect", "--format={{.Id}}", image) != (0, here):
            load = shlex.join(["docker", "--host", node.engine, "load", "--quiet"])
            commands.append(f"docker save {shlex.quote(image)} | {load}")
    return commands, unknown
