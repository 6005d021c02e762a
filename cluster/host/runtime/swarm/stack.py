"""The cluster as a stack: spec -> the file that `docker stack deploy` reads.

A service has the settings of Compose's, but for those that it cannot have: `security_opt` (set `no-new-privileges` in
each engine's daemon.json) and a limit of swap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.contract import settings
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.host.gpu.placement import NO_DEVICE
from cluster.host.runtime.compose import overlay
from cluster.host.runtime.compose.overlay import RUN_LABEL, Containers
from cluster.host.runtime.job import Job
from cluster.host.runtime.swarm.nodes import GPU

FORMAT = "3.13"
"""The newest that `docker stack deploy` reads."""
WAIT_S = "300"
"""How long tasks wait for the others: a Swarm notices after 15 s that a host is gone."""
PARTITION_LABEL = "tf-cluster.partition"
"""The label of the nodes that `--partition` names."""
SCRATCH_BYTES, SHM_BYTES = 2**30, 2**30


@dataclass(frozen=True)
class Stack:
    """What a stack needs besides its containers.

    Attributes:
        containers: what they need from their hosts.
        job: where tasks are placed, and what each of them gets.
        secrets: names of variables whose values the Swarm keeps; see `secret`.
        encrypted: whether traffic between hosts is encrypted.
    """

    containers: Containers
    job: Job
    secrets: Sequence[str] = ()
    encrypted: bool = False


def name(run_dir: Any) -> str:
    """Return the name of a run's stack: that of its Compose project, short enough for the names of services."""
    project = overlay.project(run_dir)
    return f"{project[:-9][:40].rstrip('-_')}{project[-9:]}"


def secret(stack: str, variable: str) -> str:
    """Return what the Swarm calls the secret with a variable's value."""
    return f"{stack}-{variable}"


def render(spec: ClusterSpec, stack: Stack, command: list[str]) -> dict[str, Any]:
    """Return the stack of a run.

    Args:
        spec: the cluster.
        stack: what it needs besides.
        command: what the agents start; empty for the built-in trainer.
    """
    containers = stack.containers
    labelled = {"labels": {RUN_LABEL: containers.run_dir.name}}
    network: dict[str, Any] = {"driver": "overlay", "internal": not containers.way_out, **labelled}
    if stack.encrypted:
        network["driver_opts"] = {"encrypted": "true"}
    rendered: dict[str, Any] = {
        "version": FORMAT,
        "services": {task.name: _service(spec, task, stack, command) for task in spec.tasks},
        "networks": {"cluster": network},
    }
    if stack.secrets:
        of_run = name(containers.run_dir)
        rendered["secrets"] = {each: {"external": True, "name": secret(of_run, each)} for each in stack.secrets}
    literal: dict[str, Any] = overlay.literal(rendered)
    return literal


def _service(spec: ClusterSpec, task: Task, stack: Stack, command: list[str]) -> dict[str, Any]:
    containers, job = stack.containers, stack.job
    gpus = int(job.gpus_per_task or 0) if task.role in (Role.CHIEF, Role.WORKER) else 0
    environment = overlay.environment(spec, task, containers)
    if not settings.is_set("RENDEZVOUS_TIMEOUT_S"):
        environment["RENDEZVOUS_TIMEOUT_S"] = WAIT_S
    if gpus:
        environment |= {"GPUS_GIVEN": str(gpus), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        environment |= {"NCCL_SOCKET_IFNAME": overlay.NETWORK_INTERFACE}
    else:  # an engine whose default runtime is NVIDIA's could hand over all of them
        environment |= {"CUDA_VISIBLE_DEVICES": NO_DEVICE, "NVIDIA_VISIBLE_DEVICES": "void"}
    labels = overlay.labels(containers, task)
    service: dict[str, Any] = {
        "image": containers.image,
        "entrypoint": ["python", "-m", "cluster.agent.schedulers.service"],
        "command": command,
        "hostname": task.host,
        "user": containers.user,
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "environment": environment,
        "volumes": [*overlay.volumes(containers), *_scratch(containers, with_gpus=gpus > 0)],
        "networks": ["cluster"],
        "secrets": [{"source": each, "target": each} for each in stack.secrets],
        "stop_grace_period": "60s",  # longer than the agent gives its program to save
        "healthcheck": {  # a service has no address before its first success; a failure ends the container
            "test": ["CMD", "python", "-m", "cluster.agent.health"],
            "start_period": "60s",
            "start_interval": "1s",
            "interval": "15s",
            "timeout": "10s",
            "retries": 8,
        },
        "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
        "labels": labels,
        "deploy": {
            "labels": labels,
            "endpoint_mode": "dnsrr",  # a name is its task's own address, not one that is balanced
            # A killed agent, and the tasks of a host that is gone or drained, start again; an ended run exits with 0.
            "restart_policy": {"condition": "on-failure", "delay": "1s"},
            "placement": {"constraints": constraints(job)},
            "resources": _resources(containers, job, gpus),
        },
    }
    if gpus:
        service["ulimits"] = dict(overlay.GPU_LIMITS)
    return {key: value for key, value in service.items() if value not in ([], None)}


def constraints(job: Job) -> list[str]:
    """Return which nodes take tasks, in Docker's words."""
    named = [re.sub(r"\s*([!=]=)\s*", r"\1", part.strip()) for part in job.constraint.split(",") if part.strip()]
    return named + ([f"node.labels.{PARTITION_LABEL}=={job.partition}"] if job.partition else [])


def _resources(containers: Containers, job: Job, gpus: int) -> dict[str, Any]:
    limits: dict[str, Any] = {"pids": 4096}
    reservations: dict[str, Any] = {}
    if containers.memory_bytes:
        limits["memory"] = reservations["memory"] = str(containers.memory_bytes)
    if job.cpus_per_task:
        limits["cpus"] = reservations["cpus"] = job.cpus_per_task
    if gpus:
        reservations["generic_resources"] = [{"discrete_resource_spec": {"kind": GPU, "value": gpus}}]
    return {"limits": limits, **({"reservations": reservations} if reservations else {})}


def _scratch(containers: Containers, *, with_gpus: bool) -> list[dict[str, Any]]:
    """Return the folders in memory that a task may write; a script's /tmp is a folder of the run."""
    folder = "/var/tmp" if containers.way_out else "/tmp"  # noqa: S108
    found = [{"type": "tmpfs", "target": folder, "tmpfs": {"size": SCRATCH_BYTES}}]
    if with_gpus:  # the engine's 64 MB are too few for NCCL's buffers
        found.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": SHM_BYTES}})  # noqa: S108
    return found
