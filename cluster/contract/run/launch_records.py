"""The records of how a run was launched: its options, cluster, configuration and processes."""

import re
from dataclasses import field
from typing import Annotated, Any

from cluster.contract.schema import SPARSE, Count, Record, Seconds, dictionary, listing, mapping, text, whole
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


class Started(Record):
    """How and when a run was started: `control/started.json`. Unknown values are empty or None."""

    time: Seconds | None = field(default=None, metadata=SPARSE)
    runtime: str = field(default="", metadata=SPARSE)
    hang_timeout_s: Seconds | None = field(default=None, metadata=SPARSE)
    max_restarts: Count | None = field(default=None, metadata=SPARSE)
    max_external_restarts: Count | None = field(default=None, metadata=SPARSE)
    metrics_port: Count | None = field(default=None, metadata=SPARSE)
    min_workers: Count | None = field(default=None, metadata=SPARSE)
    grow: bool = field(default=False, metadata=SPARSE)
    requirements: str = field(default="", metadata=SPARSE)
    memory: str = field(default="", metadata=SPARSE)
    network: str = field(default="", metadata=SPARSE)
    gpus: dict[str, str] = field(default_factory=dict, metadata=SPARSE)
    job: dict[str, str] = field(default_factory=dict, metadata=SPARSE)
    env: tuple[str, ...] = field(default=(), metadata=SPARSE)
    secrets: tuple[str, ...] = field(default=(), metadata=SPARSE)
    code_dirs: tuple[str, ...] = field(default=(), metadata=SPARSE)
    tags: tuple[str, ...] = field(default=(), metadata=SPARSE)
    note: str = field(default="", metadata=SPARSE)
    mirror: str = field(default="", metadata=SPARSE)
    mirror_id: str = field(default="", metadata=SPARSE)


class _Config(Record):
    global_batch: Count = field(default=0, metadata=SPARSE)
    bitwise_elastic: Count = field(default=0, metadata=SPARSE)
    micro_batches: Count = field(default=1, metadata=SPARSE)
    loop: str = field(default="", metadata=SPARSE)
    precision: str = field(default="", metadata=SPARSE)
    script: str = field(default="", metadata=SPARSE)
    arguments: tuple[str, ...] = field(default=(), metadata=SPARSE)
    separate_chief: bool = field(default=False, metadata=SPARSE)


class _LocalTask(Record):
    command: tuple[str, ...]
    environment: dict[str, str]


class _Composed(Record):
    tasks: dict[str, _LocalTask] = field(default_factory=dict, metadata=SPARSE)
    preload: str = field(default="", metadata=SPARSE)
    inherits: tuple[str, ...] = field(default=(), metadata=SPARSE)
    network: str = field(default="", metadata=SPARSE)


class _Code(Record):
    commit: str | None = field(default=None, metadata=SPARSE)


class _Manifest(Record):
    runtime: str = field(default="", metadata=SPARSE)
    code: Annotated[dict[str, Any], dictionary(_Code)] = field(default_factory=dict, metadata=SPARSE)


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
