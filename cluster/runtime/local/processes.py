"""The tasks of a local run: each task's command and its environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import settings, tf_config
from cluster.gpu.placement import NO_DEVICE, Placement
from cluster.runtime.network import HOST, PRIVATE
from cluster.spec import ClusterSpec

PRELOAD = "train.startup.preload"
"""The module that imports what the tasks of the built-in trainer share."""


def processes_of(
    spec: ClusterSpec,
    run_dir: Path,
    data_dir: Path,
    command: list[str],
    more: Mapping[str, str | None] | None = None,
    gpus: Placement | None = None,
    network: str = HOST,
) -> dict[str, Any]:
    """Return the local form of `compose.json`: each task's command and additional environment.

    Args:
        spec: the cluster.
        run_dir: the run's folder.
        data_dir: the folder of prepared data.
        command: what the agents start; empty for the built-in trainer.
        more: variables that every task gets; None is the value that the caller has.
        gpus: each task's; without, none sees any.
        network: `private` or `host`.
    """
    given = {name: value for name, value in (more or {}).items() if value is not None}
    gpus = gpus or Placement()
    tasks = {}
    for task in spec.tasks:
        environment = {"RUN_DIR": str(run_dir), "DATA_DIR": str(data_dir), "TASK": task.name, **given}
        environment |= visible(gpus, task.name)
        if network == PRIVATE and gpus.of(task.name):
            environment["NCCL_SOCKET_IFNAME"] = "lo"  # the caller's may be one that is not in there
        if text := tf_config.dumps(spec, task):
            environment["TF_CONFIG"] = text
        tasks[task.name] = {
            "command": [sys.executable, "-m", "cluster.agent", *command],
            "environment": environment,
        }
    names = [name for name, value in (more or {}).items() if value is None]
    found: dict[str, Any] = {"runtime": "local", "network": network, "inherits": names, "tasks": tasks}
    # An accelerator's library must be new in the process that uses it.
    accelerated = bool(spec.kind.hardware) or any(gpus.of(task.name) for task in spec.tasks)
    shared = settings.is_on("SHARED_IMPORT")
    return found | {"preload": PRELOAD} if shared and not command and not accelerated else found


def visible(gpus: Placement, task: str) -> dict[str, str]:
    """Return the variables that make a process see its own GPUs and no others, whatever its caller sees."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.of(task)) or NO_DEVICE}
    if not gpus.of(task):
        return visible
    return visible | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | gpus.environment(task)  # the order of nvidia-smi's indices
