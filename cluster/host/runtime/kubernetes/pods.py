"""What every pod of a run is like: the Compose file's settings, in Kubernetes' words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.contract.spec import TASK_PORT, ClusterSpec, Role

SHARED = "/shared"
"""Where pods have the shared volume; the runs are in `runs/` there, and prepared data in `data/`."""
RECORDS = "/etc/tf-cluster"
CONTAINER = "tensorflow"
"""The container's name, as Kubeflow's operator expects it."""
USER = 10001
"""User and group of the images."""
GRACE_S = 60
"""Longer than the agent gives its program to save, as in the Compose file."""
WAIT_S = 3600
"""How long tasks wait for the others to be scheduled before the run fails."""
GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Manifest:
    """What is rendered.

    Attributes:
        name: of the run and of every object.
        spec: the cluster, with the host names that its pods will have.
        config: the resolved training configuration.
        started: the record of how the run was started, as far as it is known before that.
        image: for the tasks.
        tensorboard_image: for TensorBoard; empty for none.
        claim: the persistent volume claim with runs and data.
        memory_bytes: what a task may use.
        cpus: what a task requests of processors; it may use more.
        gpus: of the chief and of each worker.
        environment: variables that every task gets.
    """

    name: str
    spec: ClusterSpec
    config: Mapping[str, Any]
    started: Mapping[str, Any]
    image: str
    tensorboard_image: str
    claim: str
    memory_bytes: int
    cpus: int
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels of one part: `task`, `tensorboard` or `data`."""
        return {
            "app.kubernetes.io/name": "tf-cluster",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }


def task(manifest: Manifest, role: Role, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod template of a role's tasks.

    Args:
        manifest: what is rendered.
        role: of the tasks.
        environment: the variables that say which task a pod is.
    """
    gpus = manifest.gpus if role in (Role.CHIEF, Role.WORKER) else 0
    resources = {
        "requests": {"cpu": str(manifest.cpus), "memory": f"{manifest.memory_bytes // 2**20}Mi"},
        "limits": {"memory": f"{manifest.memory_bytes // 2**20}Mi"} | ({GPU: gpus} if gpus else {}),
    }
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": manifest.image,
        "command": ["python", "-m", "cluster.agent.schedulers.pod"],
        "env": [*environment, *_environment(manifest, gpus)],
        "ports": [{"name": "tfjob-port", "containerPort": TASK_PORT}],
        "resources": resources,
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "records", "mountPath": RECORDS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the pod's own
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": manifest.claim}},
        {"name": "records", "configMap": {"name": f"{manifest.name}-records"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
    ]
    if gpus:  # the 64 MiB that an engine gives are too few for NCCL's buffers
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    return template(manifest.labels("task"), container, volumes, grace_s=GRACE_S)


def template(
    labels: dict[str, str], container: dict[str, Any], volumes: list[dict[str, Any]], *, grace_s: int
) -> dict[str, Any]:
    """Return a pod template without any privilege: not root, nothing writable but its volumes, no token of the API."""
    bounded = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    return {
        "metadata": {"labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,  # its first process reaps what a program leaves behind
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container | {"securityContext": bounded}],
            "volumes": volumes,
        },
    }


def variables(values: Mapping[str, str]) -> list[dict[str, str]]:
    """Return environment variables as a container has them; a `$` of theirs begins no reference."""
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in values.items()]


def _environment(manifest: Manifest, gpus: int) -> list[dict[str, str]]:
    values = {
        "RUN_DIR": f"{SHARED}/runs/{manifest.name}",
        "DATA_DIR": f"{SHARED}/data",
        "RECORDS_DIR": RECORDS,
        "RENDEZVOUS_TIMEOUT_S": str(WAIT_S),
    }
    if gpus:
        values |= {"GPUS_GIVEN": str(gpus), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    elif manifest.gpus:  # a node whose default runtime is NVIDIA's could hand over all of them
        values |= {"CUDA_VISIBLE_DEVICES": "-1", "NVIDIA_VISIBLE_DEVICES": "void"}
    return variables(values | dict(manifest.environment))
