"""A run as objects for Kubernetes: pure functions from a description to manifests; nothing here talks to a cluster.

A JobSet or Kubeflow's TFJob starts the pods and starts them again, see https://jobset.sigs.k8s.io/docs/concepts/ and
https://www.kubeflow.org/docs/components/training/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.contract import tf_config
from cluster.contract.run.joining import hub_port
from cluster.contract.spec import TASK_PORT, ClusterSpec, Role
from cluster.host.runtime.payload import data_words
from cluster.system.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIMEOUT

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
        started: the record of how the run was started, as far as it is known before that.
        claim: the persistent volume claim with runs and data.
        memory_bytes: what a task may use.
        cpus: what a task requests of processors; it may use more.
        gpus: of the chief and of each worker.
    """

    name: str
    spec: ClusterSpec
    config: Mapping[str, Any]
    started: Mapping[str, Any]
    image: str
    claim: str
    memory_bytes: int
    cpus: int
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels of one part: `task` or `data`."""
        return {
            "app.kubernetes.io/name": "tf-cluster",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }


def task_template(manifest: Manifest, role: Role, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod template of a role's tasks; the given variables say which task a pod is."""
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
    return pod_template(manifest.labels("task"), container, volumes, grace_s=GRACE_S)


def pod_template(
    labels: dict[str, str], container: dict[str, Any], volumes: list[dict[str, Any]], *, grace_s: int
) -> dict[str, Any]:
    """Return a pod template without any privilege: not root, nothing writable but its volumes, no token of the API."""
    bounded = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
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
    values |= manifest.environment
    # A `$` of theirs begins no reference.
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in values.items()]


POD_RETRIES = 20
"""Pods of a job that may fail, other than by eviction, before the whole set is started again."""
SET_RESTARTS = 10
"""How often that happens before the set fails."""
REPLICA_TYPES = {Role.CHIEF: "Chief", Role.WORKER: "Worker", Role.PS: "PS", Role.EVALUATOR: "Evaluator"}
INDEX = "JOB_COMPLETION_INDEX"


def place_tasks(kind: str, spec: ClusterSpec, name: str) -> ClusterSpec:
    """Return the cluster with the host names that a kind of job gives its pods."""
    host, _ = KINDS[kind]
    return replace(
        spec,
        tasks=tuple(
            replace(task, host=host.format(name=name, role=task.role.value, index=task.index)) for task in spec.tasks
        ),
    )


def jobset(manifest: Manifest) -> dict[str, Any]:
    """Return the JobSet: a job for each role, with a pod for each task.

    A pod that is lost is started again by its job and the agents re-form the cluster; a job that cannot has the whole
    set started again. A run that failed by itself fails the set at once.
    """
    jobs = [
        {"name": role.value, "replicas": 1, "template": {"spec": _job(manifest, role)}}
        for role in Role
        if manifest.spec.of(role)
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": manifest.name, "labels": manifest.labels("task")},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": manifest.name},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": SET_RESTARTS,
                "rules": [{"name": "runFailed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": jobs,
        },
    }


def _job(manifest: Manifest, role: Role) -> dict[str, Any]:
    count = len(manifest.spec.of(role))
    template = task_template(manifest, role, _identity(manifest.spec, role))
    template["spec"]["restartPolicy"] = "Never"  # so that the exit code is the job's to judge
    codes = {"containerName": CONTAINER, "operator": "In"}
    failed = list(range(EXIT_FAILED, EXIT_TIMEOUT + 1))
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": POD_RETRIES,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": codes | {"values": failed}},
                {"action": "Ignore", "onExitCodes": codes | {"values": [EXIT_INTERRUPTED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }


def _identity(spec: ClusterSpec, role: Role) -> list[dict[str, Any]]:
    """Return the variables that say which task a pod is: one template serves all of a role, by their index."""
    first = spec.of(role)[0]
    if role in (Role.CHIEF, Role.EVALUATOR):
        name, text, index = first.name, tf_config.dumps(spec, first), []
    else:
        name, text = f"{role.value}-$({INDEX})", tf_config.dumps(spec, first)
        if text:
            text = text.replace('"index":0', f'"index":$({INDEX})')
        path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        index = [{"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    return [*index, {"name": "TASK", "value": name}, *([{"name": "TF_CONFIG", "value": text}] if text else [])]


def tfjob(manifest: Manifest) -> dict[str, Any]:
    """Return the TFJob, whose operator sets a TF_CONFIG in each pod that says which task it is.

    `ExitCode` starts a pod again that ended with 128 or more, as one that was killed or asked to end, and fails the job
    at any smaller code, which says that the run failed.
    """
    specs = {}
    for role, kind in REPLICA_TYPES.items():
        if tasks := manifest.spec.of(role):
            template = task_template(manifest, role, [])
            specs[kind] = {"replicas": len(tasks), "restartPolicy": "ExitCode", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": manifest.name, "labels": manifest.labels("task")},
        "spec": {"runPolicy": {"cleanPodPolicy": "Running"}, "tfReplicaSpecs": specs},
    }


KINDS: dict[str, tuple[str, Callable[[Manifest], dict[str, Any]]]] = {
    "jobset": ("{name}-{role}-0-{index}.{name}", jobset),  # in the headless service of its name
    "tfjob": ("{name}-{role}-{index}", tfjob),  # each pod has a headless service
}
"""For each kind of job, the host names of its pods, and the function that renders the job."""
DNS_PORT = 53
DATA_MEMORY = "4Gi"


def records(manifest: Manifest) -> dict[str, Any]:
    """Return the ConfigMap from which the chief's pod lays out the run folder."""
    values = {
        "cluster.json": manifest.spec.to_json(),
        "config.json": dict(manifest.config),
        "started.json": dict(manifest.started),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{manifest.name}-records", "labels": manifest.labels("task")},
        "data": {name: json.dumps(value, indent=2) + "\n" for name, value in values.items()},
    }


def network_policy(manifest: Manifest) -> dict[str, Any]:
    """Return the policy by which only tasks of the run reach its tasks, and these reach nothing else.

    TensorFlow's servers run what they are sent, without authentication or encryption (TensorFlow's SECURITY.md).
    Between GPUs any port is open: NCCL chooses its own.
    """
    tasks: dict[str, Any] = {"podSelector": {"matchLabels": manifest.labels("task")}}
    own = range(TASK_PORT, hub_port(TASK_PORT) + 1)  # of TensorFlow's servers, the standby processes', the agents' hub
    ports = {} if manifest.gpus else {"ports": [{"protocol": "TCP", "port": port} for port in own]}
    names = {"ports": [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]}
    labels = manifest.labels("task")
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{manifest.name}-task", "labels": labels},
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [tasks]} | ports],
            "egress": [{"to": [tasks]} | ports, names],
        },
    }


def data_job(manifest: Manifest) -> dict[str, Any]:
    """Return the job that prepares the run's data on the shared volume, once, from where it can be downloaded."""
    verb, *words = data_words(manifest.config)
    container = {
        "name": "data",
        "image": manifest.image,
        "command": ["python", "-m", "train.data", verb],
        "args": [f"--name={manifest.config['dataset']}", f"--data-dir={SHARED}/data", *words],
        "resources": {"requests": {"cpu": "1", "memory": DATA_MEMORY}, "limits": {"memory": DATA_MEMORY}},
        "volumeMounts": [{"name": "shared", "mountPath": SHARED}, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": manifest.claim}},
        {"name": "tmp", "emptyDir": {}},
    ]
    template = pod_template(manifest.labels("data"), container, volumes, grace_s=5)
    template["spec"]["restartPolicy"] = "OnFailure"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{manifest.name}-data", "labels": manifest.labels("data")},
        "spec": {"backoffLimit": 3, "template": template},
    }
