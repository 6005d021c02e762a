"""From options to manifests for Kubernetes: checked as `up` checks them, but for what only the machine of `up` has."""

import os
import re
from dataclasses import replace
from typing import Any

from cluster.contract import spec, strategies
from cluster.contract.spec import ClusterSpec
from cluster.host.image import images
from cluster.host.kubernetes import kubernetes_objects
from cluster.host.kubernetes.kubernetes_objects import Manifest
from cluster.host.launch import configuration, planning
from cluster.host.launch.planning import build_cluster, check_elastic_batch, elastic_record
from cluster.host.options.request import PRESET, Request, check_together
from cluster.host.runtime import resources
from cluster.host.runtime.payload import parse_variables
from cluster.system.errors import UsageError, nearest

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Pods are called after it, with up to 23 characters more, and no label of a host name has more than 63."""
MEMORY, CPUS, CLAIM = "4GiB", "2", "tf-cluster"
MAX_GPUS = 64


def render(
    request: Request, kind: str = "jobset", image: str = "", claim: str = CLAIM, cpus: str = CPUS, *, data: bool = False
) -> list[dict[str, Any]]:
    """Return the objects of a run, or with `data` the job that prepares its data. Changes nothing.

    The kind is `jobset` or `tfjob`; without an image the tasks get that of this project. `claim` is the persistent
    volume claim with runs and data, and `cpus` the number of processors that each task requests.
    """
    if kind not in kubernetes_objects.KINDS:
        raise UsageError(f"--kind {kind!r} is not a kind of job{nearest(kind, kubernetes_objects.KINDS)}")
    _, render_job = kubernetes_objects.KINDS[kind]
    manifest = _manifest(request, image, claim, cpus)
    manifest = replace(manifest, spec=kubernetes_objects.place_tasks(kind, manifest.spec, manifest.name))
    if data:
        return [kubernetes_objects.data_job(manifest)]
    return [kubernetes_objects.records(manifest), kubernetes_objects.network_policy(manifest), render_job(manifest)]


NOT_RENDERED = (
    *("script", "separate_chief", "requirements", "runtime", "network", "gpus"),
    *("resume", "mirror", "trust", "fresh", "detach", "init_from", "tensorboard_port", "metrics_port"),
    *("partition", "constraint", "time", "account", "nodes", "cpus_per_task"),
    "secret",
)
"""Options that say what happens on the machine of `up`, or need code that the image does not hold."""
WARNING = (
    "warning: TensorFlow's servers ask for no password, and only a network plugin that enforces network policies keeps "
    "others from them: see docs/guides/kubernetes.md"
)


def _manifest(request: Request, image: str, claim: str, requested_cpus: str) -> Manifest:
    check_together(request, scripted=False)
    name = request.name or (request.preset or PRESET).rpartition(":")[2].replace("_", "-").lower()
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: Kubernetes takes small letters, digits and '-', at most 40, the first a letter; "
            "choose such a name"
        )
    cpus = spec.parse_count("cpus", requested_cpus, 1, 1024)
    gpus = spec.parse_count("gpus-per-task", request.gpus_per_task or 0, 0, MAX_GPUS)
    cluster = _cluster(request, gpus)
    config, _, _ = configuration.resolve_config(request, cores=cpus)
    planning.check_sharing(config, cluster)
    elastic_run = elastic_record(request, request, cluster)
    check_elastic_batch(elastic_run, cluster, config)
    given = {name: os.environ[name] if value is None else value for name, value in parse_variables(request.env).items()}
    return Manifest(
        name=name,
        spec=cluster,
        config=config,
        started={
            "hang_timeout_s": request.count("hang_timeout"),
            "max_restarts": request.count("max_restarts"),
            "max_external_restarts": request.count("max_external_restarts"),
            **elastic_run,
        },
        image=image or images.train_image("gpu" if gpus else "cpu"),
        claim=claim,
        memory_bytes=resources.parse_memory(request.memory or MEMORY),
        cpus=cpus,
        gpus=gpus,
        environment=({"NCCL_DEBUG": "WARN"} if gpus else {}) | given,
    )


def _cluster(request: Request, gpus: int) -> ClusterSpec:
    cluster = build_cluster(request)
    if gpus:
        planning.check_gpus(f"--gpus-per-task {gpus}", request, cluster, gpus)
        cluster = cluster.with_devices(gpus, request.strategy or strategies.AUTO)
    planning.check_devices(request, cluster, gpus)
    if cluster.kind.hardware:
        raise UsageError(f"--strategy {cluster.strategy}: no manifests are rendered for other hardware than GPUs")
    return cluster
