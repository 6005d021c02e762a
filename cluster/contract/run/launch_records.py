"""The records of how a run was launched: its options, cluster, configuration and processes."""

import re
from dataclasses import field
from typing import Annotated, Any

from cluster.contract.schema import Count, Record, Seconds, dictionary, listing, mapping, text, whole
from cluster.contract.spec import MAX_DEVICES, MAX_TASKS, ClusterSpec


class TaskAddress(Record):
    """The node and address of a task in a Slurm job, and the job's number."""

    node: str
    host: str
    port: Count
    job: str = ""


class Process(Record):
    """A process's identity, see `cluster.system.processes.identity`."""

    pid: Annotated[int, whole("the id of a process", 1, 2**22 - 1)]
    start_ticks: Count | None = None


class Programs(Record):
    """The processes of a task's newest attempt: `control/programs/<task>.json`."""

    agent: Process
    program: Process


class Stages(Record):
    """The stages into which a pipeline's model is cut: `stages.json`."""

    cut: tuple[str, ...] = ()
    """The first layer of each stage except the first."""


TRAINER_IMPORTS = "train.startup.preload"
"""The module that imports everything a training program needs."""


class Started(Record, sparse=True):
    """How and when a run was started: `control/started.json`. Unknown values are empty or None."""

    time: Seconds | None = None
    runtime: str = ""
    hang_timeout_s: Seconds | None = None
    max_restarts: Count | None = None
    max_external_restarts: Count | None = None
    metrics_port: Count | None = None
    min_workers: Count | None = None
    grow: bool = False
    requirements: str = ""
    memory: str = ""
    network: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    job: dict[str, str] = field(default_factory=dict)
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    code_dirs: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    note: str = ""
    mirror: str = ""
    mirror_id: str = ""


class _Config(Record, sparse=True):
    global_batch: Count = 0
    bitwise_elastic: Count = 0
    micro_batches: Count = 1
    loop: str = ""
    precision: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()
    separate_chief: bool = False


class _LocalTask(Record):
    command: tuple[str, ...]
    environment: dict[str, str]


class _Composed(Record, sparse=True):
    tasks: dict[str, _LocalTask] = field(default_factory=dict)
    preload: str = ""
    inherits: tuple[str, ...] = ()
    network: str = ""


class _Code(Record, sparse=True):
    commit: str | None = None


class _Manifest(Record, sparse=True):
    runtime: str = ""
    code: Annotated[dict[str, Any], dictionary(_Code)] = field(default_factory=dict)


config, manifest = dictionary(_Config), dictionary(_Manifest)
GPUS = "x-gpus"
"""The key of `compose.json` with the GPUs of each task; Compose ignores keys that begin with `x-`."""


def compose(value: Any) -> dict[str, Any]:
    """Check the content of `compose.json`; return it with the defaults of missing keys."""
    checked = dictionary(_Composed)(value)
    return checked | ({GPUS: mapping(listing(text))(checked[GPUS])} if GPUS in checked else {})


class TensorBoardRecord(Record):
    """The TensorBoard that was started for a run: `control/tensorboard.json`."""

    port: Annotated[int, whole("a port", 0, 2**16 - 1)]


HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,253}")


def cluster(value: Any) -> ClusterSpec:
    """Check the content of `cluster.json`; return the cluster."""
    spec = ClusterSpec.from_json(value)
    names = [task.name for task in spec.tasks]
    if names.count("chief") != 1 or len(set(names)) < len(names):
        raise ValueError("expected one chief, and every task once")
    if not 1 <= spec.devices <= MAX_DEVICES:
        raise ValueError(f"devices: expected a whole number from 1 to {MAX_DEVICES}")
    for task in spec.tasks:
        if not HOST.fullmatch(task.host) or not 0 < task.port < 2**16 or task.index >= MAX_TASKS:
            raise ValueError(f"tasks: expected an address of {task.name[:40]}")
    return spec
