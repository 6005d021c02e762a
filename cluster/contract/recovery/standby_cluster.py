"""The standby cluster, which the standby processes form among themselves before it is needed.

It has the tasks and hosts of the training cluster, but other ports: each generation that starts with the standby
cluster swaps the two sets of ports. Once every standby process has joined it, built its model and done and undone
one step, a failure costs no rendezvous, no cluster formation and no compilation: all restore the newest state and
continue.

Each standby process reports in a record of its task that it is ready. If all are, the record of the next generation
says that it starts with the standby processes. An agent whose standby process has died in between begins another
generation, with new programs; so does an agent whose program loses contact.

A process cannot rejoin a TensorFlow cluster, and not all of the others notice its end. So an agent whose standby
process has ended records that, the other agents end theirs, and new standby processes form the next standby cluster.
These clusters are numbered within a generation; only processes of the same number can train together.
"""

from dataclasses import replace
from pathlib import Path

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Count, Record
from cluster.contract.spec import ClusterSpec, Task
from cluster.system.json_files import create_json, write_json
from cluster.system.ports import PORTS

VARIABLE = "STANDBY_CLUSTER"
"""The environment variable of a standby process with the TF_CONFIG of this cluster."""
NUMBER = "STANDBY_CLUSTER_NUMBER"
"""The environment variable of a standby process with the number of its cluster in its generation."""


class _Ready(Record):
    generation: Count
    number: Count


def is_possible(run: RunFolder, spec: ClusterSpec) -> bool:
    """Whether the standby processes of this run can form a cluster in advance.

    They cannot hold a second copy of the state of a GPU, a TPU or a stage. During training they must not call the
    user's code, except in the model and in the one step that they undo.
    """
    config = run.load_config({})
    known = (config.get("loop"), config.get("source"), config.get("callbacks") or "") == ("custom", "memory", "")
    return known and spec.kind.synchronous and not spec.kind.staged and not spec.kind.hardware


def port_set(run: RunFolder, generation: int) -> int:
    """Return the set of ports, 0 or 1, of a generation's cluster."""
    record = run.generation_record(generation)
    return record.standby_ports or 0 if record else 0


def spec_of_generation(run: RunFolder, spec: ClusterSpec, generation: int) -> ClusterSpec:
    """Return the cluster that the standby processes of a generation form."""
    if port_set(run, generation):
        return spec
    return replace(spec, tasks=tuple(replace(task, port=_other(task.port)) for task in spec.tasks))


def _other(port: int) -> int:
    if port in PORTS:  # local tasks share an address and have different ports
        return PORTS.start + (port - PORTS.start + len(PORTS) // 2) % len(PORTS)
    return port + 1


def newest_number(run: RunFolder, generation: int, known: int = 0) -> int:
    """Return the number of a generation's newest standby cluster, at least `known`."""
    while _replaced(run, generation, known).exists():
        known += 1
    return known


def replace_cluster(run: RunFolder, generation: int, number: int) -> None:
    """Record that a process of a standby cluster has ended, so that all its processes are replaced."""
    create_json(_replaced(run, generation, number), {})


def report_ready(run: RunFolder, task: str, generation: int, number: int) -> None:
    """Report that a task's standby process is ready."""
    path = _path(run, task)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"generation": generation, "number": number}, durable=False)


def withdraw_report(run: RunFolder, task: str) -> None:
    """Withdraw the report of a standby process that has ended or is in use."""
    _path(run, task).unlink(missing_ok=True)


def is_complete(run: RunFolder, spec: ClusterSpec, generation: int) -> bool:
    """Whether the standby processes of all tasks are ready, in the same cluster, to succeed a generation's programs."""
    names = [task.name for task in spec.tasks if not task.role.is_sidecar]
    reports = [records.read_record(_path(run, name), _Ready.from_json, None) for name in names]
    numbers = {each.number for each in reports if each and each.generation == generation}
    return len(numbers) == 1 and all(each and each.generation == generation for each in reports)


def starts_with_standby(run: RunFolder, task: Task, generation: int) -> bool:
    """Whether a task's program in a generation must be its ready standby process."""
    return not task.role.is_sidecar and is_standby_generation(run, generation)


def is_standby_generation(run: RunFolder, generation: int) -> bool:
    """Whether a generation begins with standby processes."""
    record = run.generation_record(generation)
    return record is not None and record.standby_ports is not None


def _path(run: RunFolder, task: str) -> Path:
    return run.control / "standby" / f"{task}.json"


def _replaced(run: RunFolder, generation: int, number: int) -> Path:
    return run.control / "standby" / f"replaced-{generation}-{number}.json"
