"""Renders a run as Kubernetes objects, with the checks of `up` except those of its machine; contacts no cluster.

A JobSet or Kubeflow's TFJob starts and restarts the pods, see https://jobset.sigs.k8s.io/docs/concepts/ and
https://www.kubeflow.org/docs/components/training/. `kubernetes.yaml` has the templates of the objects.
"""

import functools
import json
import os
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from invoke.util import yaml  # invoke brings PyYAML along, for its own files

from cluster.contract import spec, strategies, tf_config
from cluster.contract.run.joining import hub_port
from cluster.contract.spec import TASK_PORT, ClusterSpec, Role
from cluster.host.image import images
from cluster.host.launch import configuration, planning
from cluster.host.options.request import PRESET, Request, check_together
from cluster.host.runtime import resources
from cluster.host.runtime.payload import DIRECT, data_words, parse_variables
from cluster.system.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIMEOUT, UsageError, nearest

SHARED = "/shared"
"""The mount of the shared volume in pods, with the runs in `runs/` and prepared data in `data/`."""
RECORDS = "/etc/tf-cluster"
GRACE_S = 60
"""The grace period of pods: longer than an agent's, as in the Compose file."""
WAIT_S = 3600
"""The timeout of the rendezvous: how long tasks wait for others to be scheduled before the run fails."""
GPU = "nvidia.com/gpu"
REPLICA_TYPES = {Role.CHIEF: "Chief", Role.WORKER: "Worker", Role.PS: "PS", Role.EVALUATOR: "Evaluator"}
INDEX = "JOB_COMPLETION_INDEX"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""A valid name: pods append up to 23 characters to it, and a label of a host name has at most 63."""
MEMORY, CPUS, CLAIM = "4GiB", "2", "tf-cluster"
NOT_RENDERED = (
    *("script", "separate_chief", "requirements", "runtime", "network", "gpus"),
    *("resume", "mirror", "trust", "fresh", "detach", "init_from", "reuse_data"),
    *("partition", "constraint", "time", "account", "nodes", "cpus_per_task"),
    *("tensorboard_port", "metrics_port", "secret", "tag", "note", "keep_warm"),
)
"""Options about the machine of `up`, or that need code which is not in the image."""
WARNING = (
    "warning: TensorFlow's servers have no authentication, and only a network plugin that enforces network policies "
    "keeps others from them: see docs/guides/kubernetes.md"
)
NUMBER = re.compile(r"[-+.0-9][-+.0-9_a-fA-FoOxX]*")
"""Text that may be a number in a different version of YAML than PyYAML's, such as 1e100."""


@dataclass(frozen=True)
class Manifest:
    """The run to render.

    Attributes:
        spec: the cluster, with the host names that its pods will have.
        started: the record of how the run was started, as far as it is known before the start.
        claim: the persistent volume claim with runs and data.
        cpus: the number of processors that a task requests; it may use more.
        gpus: the number of GPUs of the chief and of each worker.
    """

    name: str
    spec: ClusterSpec
    config: dict[str, Any]
    started: dict[str, Any]
    image: str
    claim: str
    memory_bytes: int
    cpus: int
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def make(self, what: str, component: str = "task", **values: Any) -> dict[str, Any]:
        """Return a template of `kubernetes.yaml` with its values filled in; `component` is `task` or `data`."""
        shared = {"run": self.name, "image": self.image, "claim": self.claim, "shared": SHARED, "component": component}
        return dict(_fill(_templates()[what], shared | values))


@functools.cache
def _templates() -> Any:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def _fill(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a template with its placeholders replaced; one that is a whole string may have any type."""
    if isinstance(part, dict):
        return {key: _fill(each, values) for key, each in part.items()}
    if isinstance(part, list):
        return [_fill(each, values) for each in part]
    if not isinstance(part, str):
        return part
    name = part.removeprefix("$")
    return values[name] if name != part and name in values else string.Template(part).substitute(values)


def task_template(manifest: Manifest, role: Role, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod template of a role's tasks; `environment` has the variables that identify a pod's task."""
    gpus = manifest.gpus if role in (Role.CHIEF, Role.WORKER) else 0
    template = manifest.make(
        "task",
        env=[*environment, *_environment(manifest, gpus)],
        task_port=TASK_PORT,
        cpus=str(manifest.cpus),
        memory=f"{manifest.memory_bytes // 2**20}Mi",
        records=RECORDS,
        grace_s=GRACE_S,
    )
    if gpus:  # the default of 64 MiB of shared memory is too small for NCCL's buffers
        (container,) = template["spec"]["containers"]
        container["resources"]["limits"][GPU] = gpus
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  # the pod's own
        template["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    return template


def _environment(manifest: Manifest, gpus: int) -> list[dict[str, str]]:
    values = {"RUN_DIR": f"{SHARED}/runs/{manifest.name}", "DATA_DIR": f"{SHARED}/data"}
    values |= {"RECORDS_DIR": RECORDS, "RENDEZVOUS_TIMEOUT_S": str(WAIT_S)}
    if gpus:
        values |= {"GPUS_GIVEN": str(gpus), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    elif manifest.gpus:  # a node whose default runtime is NVIDIA's could expose all GPUs
        values |= {"CUDA_VISIBLE_DEVICES": "-1", "NVIDIA_VISIBLE_DEVICES": "void"}
    values |= manifest.environment
    # A `$` in a value must not begin a reference.
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in values.items()]


def place_tasks(kind: str, cluster: ClusterSpec, name: str) -> ClusterSpec:
    """Return the cluster with the host names of the pods of a kind of job."""
    host, _ = KINDS[kind]
    places = ((task, host.format(name=name, role=task.role.value, index=task.index)) for task in cluster.tasks)
    return replace(cluster, tasks=tuple(replace(task, host=place) for task, place in places))


def jobset(manifest: Manifest) -> dict[str, Any]:
    """Return the JobSet: a job for each role, with a pod for each task.

    A lost pod is restarted by its job, and the agents form the cluster again; if its job cannot, the whole set is
    restarted. A run that failed by itself fails the set immediately.
    """
    jobs = []
    for role in Role:
        if tasks := manifest.spec.of(role):
            template = task_template(manifest, role, _identity(manifest.spec, role))
            template["spec"]["restartPolicy"] = "Never"  # so that the job acts on the exit code
            failed = list(range(EXIT_FAILED, EXIT_TIMEOUT + 1))
            values: dict[str, Any] = {"role": role.value, "count": len(tasks), "template": template}
            jobs.append(manifest.make("job", failed=failed, interrupted=EXIT_INTERRUPTED, **values))
    return manifest.make("jobset", jobs=jobs)


def _identity(spec: ClusterSpec, role: Role) -> list[dict[str, Any]]:
    """Return the variables that identify a pod's task, by its index, since all pods of a role share a template."""
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
    """Return the TFJob, whose operator sets a TF_CONFIG in each pod, which identifies its task."""
    replicas = {}
    for role, kind in REPLICA_TYPES.items():
        if tasks := manifest.spec.of(role):
            replicas[kind] = manifest.make("replica", count=len(tasks), template=task_template(manifest, role, []))
    return manifest.make("tfjob", replicas=replicas)


KINDS: dict[str, tuple[str, Callable[[Manifest], dict[str, Any]]]] = {
    "jobset": ("{name}-{role}-0-{index}.{name}", jobset),  # in the headless service of its name
    "tfjob": ("{name}-{role}-{index}", tfjob),  # each pod has a headless service
}
"""For each kind of job, the host names of its pods, and the function that renders the job."""


def records(manifest: Manifest) -> dict[str, Any]:
    """Return the ConfigMap from which the chief's pod lays out the run folder."""
    values = {"cluster.json": manifest.spec.to_json(), "config.json": manifest.config, "started.json": manifest.started}
    files = {name: json.dumps(value, indent=2) + "\n" for name, value in values.items()}
    return manifest.make("records", files=files)


def network_policy(manifest: Manifest) -> dict[str, Any]:
    """Return the network policy that limits the tasks' connections to tasks of the same run.

    TensorFlow's servers execute anything they receive, without authentication or encryption (TensorFlow's SECURITY.md).
    Between tasks with GPUs all ports are open, because NCCL chooses its ports.
    """
    policy = manifest.make("network_policy")
    own = range(TASK_PORT, hub_port(TASK_PORT) + 1)  # of TensorFlow's servers, the standby processes', the agents' hub
    if not manifest.gpus:
        for rule in (policy["spec"]["ingress"][0], policy["spec"]["egress"][0]):
            rule["ports"] = [{"protocol": "TCP", "port": port} for port in own]
    return policy


def data_job(manifest: Manifest) -> dict[str, Any]:
    """Return the job that prepares the run's data on the shared volume, once, with access to downloads."""
    verb, *words = data_words(manifest.config)
    arguments = [f"--name={manifest.config['dataset']}", f"--data-dir={SHARED}/data", *words]
    command = ["python", "-m", "train.data", verb]
    return manifest.make("data_job", "data", command=command, arguments=arguments, grace_s=5)


def render(
    request: Request, kind: str = "jobset", image: str = "", claim: str = CLAIM, cpus: str = CPUS, *, data: bool = False
) -> list[dict[str, Any]]:
    """Return the objects of a run, or with `data` the job that prepares its data. Changes nothing.

    `kind` is `jobset` or `tfjob`; without an image the tasks use the project's. `claim` is the persistent volume claim
    with runs and data, and `cpus` the number of processors that each task requests.
    """
    if kind not in KINDS:
        raise UsageError(f"--kind {kind!r} is not a kind of job{nearest(kind, KINDS)}")
    _, render_job = KINDS[kind]
    manifest = _manifest(request, image, claim, cpus)
    manifest = replace(manifest, spec=place_tasks(kind, manifest.spec, manifest.name))
    if data:
        return [data_job(manifest)]
    return [records(manifest), network_policy(manifest), render_job(manifest)]


def _manifest(request: Request, image: str, claim: str, requested_cpus: str) -> Manifest:
    check_together(request, scripted=False)
    name = request.name or (request.preset or PRESET).rpartition(":")[2].replace("_", "-").lower()
    if not NAME.fullmatch(name):
        allowed = "lower-case letters, digits and '-', at most 40, the first a letter"
        raise UsageError(f"--name {name!r}: Kubernetes allows {allowed}; choose such a name")
    cpus = spec.parse_count("cpus", requested_cpus, 1, 1024)
    gpus = request.gpus_per_task or 0
    cluster = planning.build_cluster(request)
    if gpus:
        planning.check_gpus(f"--gpus-per-task {gpus}", request, cluster, gpus)
        cluster = cluster.with_devices(gpus, request.strategy or strategies.AUTO)
    planning.check_devices(request, cluster, gpus)
    if cluster.kind.hardware:
        raise UsageError(f"--strategy {cluster.strategy}: no manifests are rendered for hardware other than GPUs")
    config, _, _ = configuration.resolve_config(request, cores=cpus)
    planning.check_batch_and_precision(config, cluster)
    elastic_run = planning.elastic_record(request, request, cluster)
    planning.check_elastic_batch(elastic_run, cluster, config)
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
        environment=DIRECT | ({"NCCL_DEBUG": "WARN"} if gpus else {}) | given,
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """Writes long text as a block, and no aliases for repeated values."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        style = "|" if "\n" in data else "'" if NUMBER.fullmatch(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Return the documents as a YAML stream."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000))
