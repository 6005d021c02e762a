"""From a request to the topology of its cluster: what it leaves out is the resumed run's, or the default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster.contract import strategies
from cluster.contract.spec import MAX_TASKS, ClusterSpec, Role, parse_count
from cluster.host.options.request import WORKERS, Request
from cluster.system.errors import PrerequisiteError, UsageError

DEVICE_FILES = {"tpu": ("/dev/accel*", "/dev/vfio/[0-9]*")}
"""The files of the hardware that some strategies need, where this machine has it."""


def topology(request: Request, resumed: ClusterSpec | None = None) -> dict[str, Any]:
    """Return the options of `spec.build`; what the request leaves out is the resumed run's, or the default."""
    strategy = request.strategy or strategies.AUTO
    requested = strategies.requested(strategy)
    alone = requested is not None and requested.one_process
    if request.stages:
        return _stages(request, requested, resumed)
    if resumed is None:
        return {
            "workers": request.workers or ("0" if alone else WORKERS),
            "ps": request.ps or "0",
            "evaluator": request.evaluator,
            "data_workers": request.data_workers or "0",
            "strategy": strategy,
            "devices": request.devices or "1",
        }
    previous_workers, previous_ps = (str(len(resumed.of(role))) for role in (Role.WORKER, Role.PS))
    if requested and not alone and previous_workers == "0":
        previous_workers = WORKERS
    workers = request.workers or ("0" if alone else previous_workers)
    ps = request.ps or ("0" if workers == "0" or (requested and not requested.served) else previous_ps)
    if not request.strategy and resumed.kind.one_process == (workers == "0") and not request.ps:
        # What the topology chose once it chooses again: the number of devices alone decides OneDevice or Mirrored.
        counts = (len(resumed.of(Role.WORKER)), len(resumed.of(Role.PS)), resumed.devices)
        chosen = strategies.resolve(strategies.AUTO, *counts) == resumed.kind
        strategy = strategies.AUTO if chosen else resumed.strategy
    same = resumed.kind.staged and not request.strategy and str(previous_workers) == workers
    return {
        "workers": workers,
        "ps": ps,
        "evaluator": request.evaluator or bool(resumed.of(Role.EVALUATOR)),
        "data_workers": request.data_workers or str(len(resumed.of(Role.DATA_WORKER))),
        "strategy": strategy,
        "devices": request.devices or ("1" if requested and requested.single_device else str(resumed.devices)),
        "pipelines": resumed.pipelines if same else 1,
    }


def _stages(request: Request, requested: strategies.Strategy | None, resumed: ClusterSpec | None) -> dict[str, Any]:
    """Return the options of `spec.build` for stages: each a device of the only task, or a task in each pipeline."""
    stages = parse_count("stages", request.stages, 1, MAX_TASKS)
    if not (requested.staged if requested else resumed is not None and resumed.kind.staged):
        raise UsageError(f"--stages {stages} without --strategy pipeline: add that, or leave --stages out")
    strategy = next(name for name, record in strategies.STRATEGIES.items() if record.staged)
    alone = (request.workers or "-") == "0"
    evaluator = request.evaluator or (resumed is not None and bool(resumed.of(Role.EVALUATOR)))
    workers = request.workers or str(stages - 1)
    tasks = 1 + parse_count("workers", workers, 0, MAX_TASKS)
    if not alone and tasks % stages:
        below = max(stages, tasks // stages * stages)
        raise UsageError(
            f"--stages {stages} with --workers {workers}: the chief and the workers are {tasks} tasks, which pipelines "
            f"of {stages} cannot share; use --workers {below - 1} or {below + stages - 1}, or --workers 0 for the "
            "devices of one task"
        )
    if alone and request.devices.isdecimal() and int(request.devices) != stages:
        raise UsageError(f"--stages {stages} with --workers 0 and --devices {request.devices}: use --devices {stages}")
    return {
        "workers": workers,
        "ps": request.ps or "0",
        "evaluator": evaluator,
        "strategy": strategy,
        "devices": request.devices or (str(stages) if alone else "1"),
        "pipelines": 1 if alone else tasks // stages,
    }


def check_hardware(strategy: str) -> None:
    """Check that the hardware of a strategy is here, or that a variable such as TPU_NAME says where it is.

    Raises:
        PrerequisiteError: neither.
    """
    requested = strategies.requested(strategy)
    if requested is None or not requested.hardware:
        return
    patterns, name = DEVICE_FILES[requested.hardware], requested.hardware.upper()
    if not os.environ.get(f"{name}_NAME") and not any(any(Path("/").glob(each.lstrip("/"))) for each in patterns):
        raise PrerequisiteError(
            f"--strategy {strategy}: this machine has no {name} (no {' or '.join(patterns)}); run this where there is "
            f"one, or set {name}_NAME to one that this machine can reach"
        )
