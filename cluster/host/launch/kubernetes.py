"""From options to manifests for Kubernetes: checked as `up` checks them, but for what only the machine of `up` has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contract import spec
from cluster.contract.spec import ClusterSpec
from cluster.host.image import images
from cluster.host.launch import configuration, folders, planning
from cluster.host.launch.topology import build_cluster, check_elastic_batch, elastic_record
from cluster.host.options.request import PRESET, Request, check_together
from cluster.host.runtime import inherited, kubernetes_objects, resources
from cluster.host.runtime.kubernetes_objects import Manifest
from cluster.host.runtime.resources import TASK_MEMORY_BYTES
from cluster.system.errors import UsageError, nearest

KINDS = ("jobset", "tfjob")
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Pods are called after it, with up to 23 characters more, and no label of a host name has more than 63."""
_IMAGE = (re.compile(r"\w[\w.:/@-]*", re.ASCII), "an image as a node pulls it, such as registry.example/train:gpu")
WORDS = {
    "image": _IMAGE,
    "tensorboard_image": _IMAGE,
    "claim": (re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"), "a name of small letters, digits, '-' and '.'"),
    "storage": (re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?"), "an amount as Kubernetes has it, such as 20Gi"),
}
"""What may be written into manifests as it was typed, and how that is described."""
MEMORY, CPUS, STORAGE, CLAIM = "4GiB", "2", "20Gi", "tf-cluster"
MAX_GPUS = 64


@dataclass(frozen=True)
class Place:
    """What is requested of the Kubernetes cluster, as typed; empty is the default."""

    kind: str = "jobset"
    image: str = ""
    tensorboard_image: str = ""
    claim: str = CLAIM
    storage: str = STORAGE
    cpus: str = CPUS


def render(request: Request, place: Place) -> dict[str, list[dict[str, Any]]]:
    """Return the objects by the file that they belong to, in the order to apply them. Changes nothing.

    Raises:
        UsageError: something requested cannot be done.
    """
    manifest = _manifest(request, place)
    board = {"tensorboard.yaml": kubernetes_objects.tensorboard(manifest)} if manifest.tensorboard_image else {}
    job = kubernetes_objects.jobset(manifest) if place.kind == "jobset" else kubernetes_objects.tfjob(manifest)
    return {
        "claim.yaml": [kubernetes_objects.claim(manifest, place.storage)],
        "data.yaml": [kubernetes_objects.data_job(manifest)],
        "records.yaml": [kubernetes_objects.records(manifest)],
        "network-policy.yaml": [kubernetes_objects.network_policy(manifest)],
        f"{place.kind}.yaml": [job],
        **board,
    }


NOT_RENDERED = (
    *("script", "separate_chief", "requirements", "runtime", "network", "gpus", "gpu_runtime"),
    *("resume", "trust", "fresh", "detach", "init_from"),
    *("partition", "constraint", "time", "account", "nodes", "cpus_per_task", "apptainer"),
    *("data_workers", "secret"),
    "partition_by",  # times measured here say nothing about other machines
)
"""Options that say what happens on the machine of `up`, or need code that the image does not hold."""
WARNING = (
    "warning: TensorFlow's servers ask for no password, and only a network plugin that enforces network policies keeps "
    "others from them: see docs/guides/kubernetes.md"
)
ONCE = ("claim.yaml", "data.yaml")
"""Applied once before the first run: what must outlive a run is not deleted with its manifests."""


def kustomization(files: Mapping[str, object]) -> dict[str, Any]:
    """Return the Kustomize base of a run's files."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name in files if name not in ONCE],
    }


def _manifest(request: Request, place: Place) -> Manifest:
    check_together(request, scripted=False)
    if place.kind not in KINDS:
        raise UsageError(f"--kind {place.kind!r} is not a kind of job{nearest(place.kind, KINDS)}")
    name = request.name or (request.preset or PRESET).rpartition(":")[2].replace("_", "-").lower()
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: Kubernetes takes small letters, digits and '-', at most 40, the first a letter; "
            "choose such a name"
        )
    for option, (pattern, expected) in WORDS.items():
        if (value := getattr(place, option)) and not pattern.fullmatch(value):
            raise UsageError(f"--{option.replace('_', '-')} {value!r}: expected {expected}")
    cpus = spec.parse_count("cpus", place.cpus, 1, 1024)
    gpus = spec.parse_count("gpus-per-task", request.gpus_per_task or 0, 0, MAX_GPUS)
    cluster = _cluster(request, gpus)
    config, _, _ = configuration.resolve(request, None, None, folders.data_dir(), cores=cpus)
    planning.check_sharing(config, cluster)
    elastic_run = elastic_record(request, request, cluster)
    check_elastic_batch(elastic_run, cluster, config)
    board = request.board_port != 0
    hosts = kubernetes_objects.jobset_hosts if place.kind == "jobset" else kubernetes_objects.tfjob_hosts
    return Manifest(
        name=name,
        spec=hosts(cluster, name),
        config=config,
        started={
            "hang_timeout_s": request.count("hang_timeout"),
            "max_restarts": request.count("max_restarts"),
            "max_external_restarts": request.count("max_external_restarts"),
            **elastic_run,
        },
        image=place.image or images.train_image("gpu" if gpus else "cpu"),
        tensorboard_image=(place.tensorboard_image or images.tensorboard_image()) if board else "",
        claim=place.claim,
        memory_bytes=_memory_bytes(request),
        cpus=cpus,
        gpus=gpus,
        environment=_environment(request, gpus),
    )


def _cluster(request: Request, gpus: int) -> ClusterSpec:
    if gpus and request.devices not in (None, gpus):
        raise UsageError(
            f"--devices {request.devices} with --gpus-per-task {gpus}: a task has a replica on each of its GPUs; "
            "leave --devices out"
        )
    cluster = build_cluster(request, gpus)
    if cluster.kind.hardware:
        raise UsageError(
            f"--strategy {cluster.strategy}: no manifests are rendered for a {cluster.kind.hardware.upper()}"
        )
    return cluster


def _memory_bytes(request: Request) -> int:
    limit = resources.parse_memory(request.memory or MEMORY)
    if limit < TASK_MEMORY_BYTES:
        raise UsageError(
            f"--memory {request.memory}: TensorFlow alone takes {resources.shown_bytes(TASK_MEMORY_BYTES)}"
        )
    return limit


def _environment(request: Request, gpus: int) -> dict[str, str]:
    given = {name: os.environ[name] if value is None else value for name, value in inherited.parse(request.env).items()}
    if request.nccl_debug and not gpus:
        raise UsageError("--nccl-debug without GPUs: add --gpus-per-task, or leave it out")
    return given | ({"NCCL_DEBUG": request.nccl_debug or "WARN"} if gpus else {})
