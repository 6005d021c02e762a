"""The immutable description of a cluster: its tasks, their addresses, and the strategy that trains on them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Self

from cluster.contract import strategies
from cluster.contract.schema import Count, Record, one_of
from cluster.contract.strategies import Strategy
from cluster.system.errors import UsageError, nearest

TASK_PORT = 2222
"""Port of a task's TensorFlow server in a container, where each task has a separate address."""

DEFAULT_WORKERS = 2
"""Default number of `worker` tasks, unless the strategy uses one process."""

MAX_TASKS = 512
"""Largest number of tasks of a role: a larger one is more likely a typo."""

MAX_DEVICES = 64

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
"""A valid name of a run, which is used as a folder, a Compose project and a label."""


class Role(StrEnum):
    """The role of a task in the cluster."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"

    @property
    def is_sidecar(self) -> bool:
        """Whether tasks of this role are outside the TensorFlow cluster: a strategy would wait for them forever."""
        return self == Role.EVALUATOR


class Task(Record, kw_only=False):
    """One task of the run and the address of its TensorFlow server."""

    role: Role
    index: Count
    host: str
    port: Count

    @property
    def name(self) -> str:
        """`chief`, `worker-0`, `ps-1`, `evaluator`: also used as host name in containers and for file names."""
        return task_name(self.role, self.index)

    @property
    def address(self) -> str:
        """`host:port`, as in TF_CONFIG."""
        return f"{self.host}:{self.port}"


def _strategy(value: Any) -> Any:
    return one_of(*strategies.STRATEGIES)(value)  # looked up late: tests register more


class ClusterSpec(Record):
    """The tasks of a run and the strategy that trains on them: `cluster.json`, see `launch_records.cluster`.

    Attributes:
        strategy: a key of `strategies.STRATEGIES`.
        devices: replicas in each training task.
        separate_chief: whether TF_CONFIG has a task of type `chief`. If not, the chief is worker 0 there, unless the
            cluster has parameter servers.
        pipelines: for a staged strategy, the number of pipelines, and so of tasks with the same stage; the tasks are
            ordered by pipeline.
        tasks: chief first, then workers, parameter servers, evaluator.
    """

    strategy: Annotated[str, _strategy]
    devices: Count
    separate_chief: bool = True
    pipelines: Count = 1
    tasks: tuple[Task, ...]

    def of(self, role: Role) -> tuple[Task, ...]:
        """Return the tasks of one role in index order."""
        return tuple(task for task in self.tasks if task.role == role)

    def task(self, name: str) -> Task:
        """Return the task called `name`; raise UsageError if the cluster has no such task."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise UsageError(f"no task {name!r} in this cluster{nearest(name, [task.name for task in self.tasks])}")

    @cached_property
    def members(self) -> tuple[Task, ...]:
        """The tasks that form the TensorFlow cluster; empty if one process trains alone."""
        members = tuple(task for task in self.tasks if not task.role.is_sidecar)
        return members if len(members) > 1 else ()

    @property
    def kind(self) -> Strategy:
        return strategies.get(self.strategy)

    @property
    def strategy_class(self) -> str:
        """TensorFlow's name of the strategy."""
        return self.kind.class_name

    @property
    def stages(self) -> int:
        """The number of stages into which the model is cut, one on each device; 1 if every replica has all of it."""
        return (1 + len(self.of(Role.WORKER))) * self.devices // self.pipelines if self.kind.staged else 1

    @property
    def replicas(self) -> int:
        """The number of copies of the model that compute gradients in parallel."""
        if self.kind.staged:
            return self.pipelines
        if self.kind.served:
            return len(self.of(Role.WORKER)) * self.devices
        return (1 + len(self.of(Role.WORKER))) * self.devices

    @property
    def copies_weights(self) -> bool:
        """Whether several replicas each have a copy of the weights, whose bits must be equal."""
        return self.kind.mirrored and self.replicas > 1

    @property
    def batch_divisor(self) -> int:
        """The divisor of the global batch. A parameter-server step is one worker's step on a whole batch."""
        return self.devices if self.kind.served else self.replicas

    def serves(self, task: Task) -> bool:
        """Whether the task is a server for others, whose program never ends by itself."""
        return task.role == Role.PS or (task.role == Role.WORKER and self.kind.served)

    def tasks_on_host(self, task: Task) -> int:
        """Return how many training tasks have a task's host; each container is a separate host."""
        return sum(other.host == task.host for other in self.tasks if not other.role.is_sidecar)

    def calls_first(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks whose TensorFlow servers this task calls as soon as it forms the cluster."""
        if self.kind.served:
            return () if self.serves(task) else (*self.of(Role.WORKER), *self.of(Role.PS))
        return self.of(Role.CHIEF) if task.role == Role.WORKER else ()

    def restarts_alone(self, task: Task) -> bool:
        """Whether the task can restart while the others continue; any other task restarts together with the gang."""
        return task.role.is_sidecar or (task.role == Role.WORKER and self.kind.served)

    def with_devices(self, devices: int, strategy: str) -> Self:
        """Return the cluster with `devices` replicas in each training task, for the requested strategy or `auto`.

        With `auto`, the number of devices can change the strategy. Raises UsageError if the strategy does not fit.
        """
        parse_count("devices", devices, 1, MAX_DEVICES)
        resolved = strategies.resolve(strategy, len(self.of(Role.WORKER)), len(self.of(Role.PS)), devices)
        return replace(self, strategy=resolved.name, devices=devices)

    def without(self, names: Collection[str]) -> Self:
        """Return the cluster without the named tasks; the others keep their names."""
        return replace(self, tasks=tuple(task for task in self.tasks if task.name not in names))

    def listening(self, ports: Sequence[int]) -> Self:
        """Return the cluster with its tasks on these ports of 127.0.0.1, one each."""
        tasks = (replace(task, host="127.0.0.1", port=port) for task, port in zip(self.tasks, ports, strict=True))
        return replace(self, tasks=tuple(tasks))


def task_name(role: Role, index: int) -> str:
    """Return a task's name, with an index unless the role has at most one task."""
    return role.value if role in (Role.CHIEF, Role.EVALUATOR) else f"{role.value}-{index}"


def parse_count(name: str, value: object, low: int, high: int) -> int:
    """Parse the option `name` as a whole number from `low` to `high`; raise UsageError if it is not."""
    text = str(value).strip()
    if not re.fullmatch(r"[+-]?\d{1,18}", text) or not low <= int(text) <= high:
        raise UsageError(f"--{name} {text!r}: expected a whole number from {low} to {high}")
    return int(text)


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str, option: str = "older") -> float:
    """Return an age such as `7d`, `12h`, `30m` or `2w` in seconds."""
    if not (match := re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip())):
        raise UsageError(f"--{option} {text!r}: expected a number followed by s, m, h, d or w, such as 7d")
    return float(match[1]) * UNITS[match[2]]


def check_run_name(name: str) -> str:
    """Return `name`; raise UsageError if it is not a valid name of a run, see `RUN_NAME`."""
    if not RUN_NAME.fullmatch(name):
        expected = "letters, digits, '.', '_' or '-', at most 63, the first a letter or digit"
        raise UsageError(f"run name {name!r}: expected {expected}")
    return name


def build(
    workers: object = None,
    ps: object = 0,
    evaluator: bool = False,
    strategy: str = "auto",
    devices: object = 1,
    separate_chief: bool = True,
    pipelines: int = 1,
) -> ClusterSpec:
    """Return the cluster for command-line options. Each task listens on `TASK_PORT` of a host with the task's name.

    `workers` is the number of workers besides the chief, None for the default; see `ClusterSpec` for other options.
    """
    if workers is None:
        requested = strategies.requested(strategy)
        workers = 0 if requested and requested.one_process else DEFAULT_WORKERS
    num_workers = parse_count("workers", workers, 0, MAX_TASKS)
    num_ps = parse_count("ps", ps, 0, MAX_TASKS)
    num_devices = parse_count("devices", devices, 1, MAX_DEVICES)
    resolved = strategies.resolve(strategy, num_workers, num_ps, num_devices).name
    counts = {Role.CHIEF: 1, Role.WORKER: num_workers, Role.PS: num_ps, Role.EVALUATOR: int(evaluator)}
    slots = [(role, index) for role, count in counts.items() for index in range(count)]
    tasks = tuple(Task(role, index, task_name(role, index), TASK_PORT) for role, index in slots)
    return ClusterSpec(
        strategy=resolved, devices=num_devices, separate_chief=separate_chief, pipelines=pipelines, tasks=tasks
    )
