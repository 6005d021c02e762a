"""What launching a run records, checked when it is read: tasks can write anything there."""

from __future__ import annotations

import re
from typing import Any

from cluster.contract.run.fields import ABSENT, count, flag, listing, mapping, one_of, record, seconds, text
from cluster.contract.spec import MAX_DEVICES, MAX_TASKS, ClusterSpec, Role, Task
from cluster.contract.strategies import STRATEGIES

TRAINER_IMPORTS = "train.startup.preload"
"""The module that imports everything a training program needs."""

started = record(
    {},
    {
        "time": (seconds, ABSENT),
        "runtime": (text, ABSENT),
        "hang_timeout_s": (seconds, ABSENT),
        "max_restarts": (count, ABSENT),
        "max_external_restarts": (count, ABSENT),
        "min_workers": (count, ABSENT),
        "grow": (flag, ABSENT),
        "requirements": (text, ABSENT),
        "memory": (text, ABSENT),
        "network": (text, ABSENT),
        "gpus": (mapping(text), ABSENT),
        "job": (mapping(text), ABSENT),
        "env": (listing(text), ABSENT),
        "code_dirs": (listing(text), ABSENT),
    },
)

config = record(
    {},
    {
        "global_batch": (count, ABSENT),
        "bitwise_elastic": (count, ABSENT),
        "micro_batches": (count, ABSENT),
        "loop": (text, ABSENT),
        "precision": (text, ABSENT),
        "script": (text, ABSENT),
        "arguments": (listing(text), ABSENT),
        "separate_chief": (flag, ABSENT),
    },
)

compose = record(
    {},
    {
        "x-gpus": (mapping(listing(text)), ABSENT),
        "tasks": (mapping(record({"command": listing(text), "environment": mapping(text)})), ABSENT),
        "preload": (text, ABSENT),
        "inherits": (listing(text), ABSENT),
        "network": (text, ABSENT),
    },
)

stages = record({"measured_for": mapping(text), "cut": listing(text), "seconds": listing(seconds)})


def _port(value: Any) -> int:
    """A port."""
    if count(value) >= 2**16:
        raise ValueError(f"expected a port, found {value}")
    return count(value)


board = record({"port": _port})

manifest = record({}, {"runtime": (text, ABSENT)})

HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,253}")


def _strategy(value: Any) -> Any:
    return one_of(*STRATEGIES)(value)  # those that are registered now


_task = record({"role": one_of(*Role), "index": count, "host": text, "port": count})
_cluster = record({"strategy": _strategy, "devices": count, "tasks": listing(_task, 3 * MAX_TASKS)})


def cluster(value: Any) -> ClusterSpec:
    """The cluster of a run."""
    spec = ClusterSpec.from_json(_cluster(value))
    names = [task.name for task in spec.tasks]
    if names.count("chief") != 1 or len(set(names)) < len(names):
        raise ValueError("expected one chief, and every task once")
    if not 1 <= spec.devices <= MAX_DEVICES:
        raise ValueError(f"devices: expected a whole number from 1 to {MAX_DEVICES}")
    if bad := [task for task in spec.tasks if not _listens(task)]:
        raise ValueError(f"tasks: expected an address of {bad[0].name[:40]}")
    return spec


def _listens(task: Task) -> bool:
    return bool(HOST.fullmatch(task.host)) and 0 < task.port < 2**16 and task.index < MAX_TASKS
