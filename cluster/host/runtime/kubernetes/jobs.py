"""What starts a run's pods and starts them again: a JobSet, or Kubeflow's TFJob.

Sources: https://jobset.sigs.k8s.io/docs/concepts/ and https://www.kubeflow.org/docs/components/training/
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.contract import tf_config
from cluster.contract.spec import ClusterSpec, Role
from cluster.host.runtime.kubernetes import pods
from cluster.host.runtime.kubernetes.pods import Manifest
from cluster.system.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIMEOUT

POD_RETRIES = 20
"""Pods of a job that may fail, other than by eviction, before the whole set is started again."""
SET_RESTARTS = 10
"""How often that happens before the set fails."""
REPLICA_TYPES = {Role.CHIEF: "Chief", Role.WORKER: "Worker", Role.PS: "PS", Role.EVALUATOR: "Evaluator"}
INDEX = "JOB_COMPLETION_INDEX"


def jobset_hosts(spec: ClusterSpec, name: str) -> ClusterSpec:
    """Return the cluster with the host names that a JobSet gives its pods, in the headless service of its name."""
    tasks = (replace(task, host=f"{name}-{task.role.value}-0-{task.index}.{name}") for task in spec.tasks)
    return replace(spec, tasks=tuple(tasks))


def tfjob_hosts(spec: ClusterSpec, name: str) -> ClusterSpec:
    """Return the cluster with the host names of a TFJob, whose pods have a headless service each."""
    tasks = (replace(task, host=f"{name}-{task.role.value}-{task.index}") for task in spec.tasks)
    return replace(spec, tasks=tuple(tasks))


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
    template = pods.task(manifest, role, _identity(manifest.spec, role))
    template["spec"]["restartPolicy"] = "Never"  # so that the exit code is the job's to judge
    codes = {"containerName": pods.CONTAINER, "operator": "In"}
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
            template = pods.task(manifest, role, [])
            specs[kind] = {"replicas": len(tasks), "restartPolicy": "ExitCode", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": manifest.name, "labels": manifest.labels("task")},
        "spec": {"runPolicy": {"cleanPodPolicy": "Running"}, "tfReplicaSpecs": specs},
    }
