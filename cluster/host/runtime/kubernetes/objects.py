"""What stands beside a run's pods: its records, its network policy, TensorBoard; and what is applied once before it."""

from __future__ import annotations

import json
from typing import Any

from cluster.contract.run.joining import hub_port
from cluster.contract.spec import TASK_PORT
from cluster.host.runtime.kubernetes import pods
from cluster.host.runtime.kubernetes.pods import SHARED, Manifest
from cluster.host.runtime.payload import data_words

TENSORBOARD_PORT = 6006
DNS_PORT = 53
TENSORBOARD_MEMORY = "2Gi"
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
    return _policy(manifest, "task", ingress=[{"from": [tasks]} | ports], egress=[{"to": [tasks]} | ports, names])


def tensorboard(manifest: Manifest) -> list[dict[str, Any]]:
    """Return TensorBoard over the run, its service, and the policy by which no pod reaches it: it asks for no password.

    `kubectl port-forward` does, because it begins inside of the pod.
    """
    name, labels = f"{manifest.name}-tensorboard", manifest.labels("tensorboard")
    folder = f"{SHARED}/runs/{manifest.name}/tensorboard"
    container = {
        "name": "tensorboard",
        "image": manifest.tensorboard_image,
        "args": [f"--logdir={folder}", "--host=0.0.0.0", f"--port={TENSORBOARD_PORT}", "--reload_interval=5"],
        "ports": [{"name": "http", "containerPort": TENSORBOARD_PORT}],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": TENSORBOARD_MEMORY}},
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the pod's own
        ],
    }
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": manifest.claim, "readOnly": True}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
    ]
    metadata = {"name": name, "labels": labels}
    template = pods.template(labels, container, volumes, grace_s=5)
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"name": "http", "port": TENSORBOARD_PORT, "targetPort": "http"}]},
        },
        _policy(manifest, "tensorboard", ingress=[], egress=[]),
    ]


def claim(manifest: Manifest, size: str) -> dict[str, Any]:
    """Return the claim of the shared volume. It outlives runs, so no run's manifests have it."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": manifest.claim, "labels": {"app.kubernetes.io/name": "tf-cluster"}},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
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
    template = pods.template(manifest.labels("data"), container, volumes, grace_s=5)
    template["spec"]["restartPolicy"] = "OnFailure"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{manifest.name}-data", "labels": manifest.labels("data")},
        "spec": {"backoffLimit": 3, "template": template},
    }


def _policy(
    manifest: Manifest, component: str, *, ingress: list[dict[str, Any]], egress: list[dict[str, Any]]
) -> dict[str, Any]:
    labels = manifest.labels(component)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{manifest.name}-{component}", "labels": labels},
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }
