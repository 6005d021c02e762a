"""From a request to its cluster, and what a run that may lose workers requires of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.contract import spec, strategies
from cluster.contract.spec import ClusterSpec, Role
from cluster.host.options.request import WORKERS, Request
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.messages import counted

DEVICE_FILES = {"tpu": ("/dev/accel*", "/dev/vfio/[0-9]*")}
"""The files of the hardware that some strategies need, where this machine has it."""


def build_cluster(request: Request, devices: int | None = None) -> ClusterSpec:
    """Return the cluster of a request.

    Args:
        request: what is requested, with the topology of the run that is resumed.
        devices: the GPUs of each task, if it has any: each is a device.

    Raises:
        UsageError: there is no such cluster.
    """
    strategy = strategies.requested(request.strategy or strategies.AUTO)
    if request.stages is not None:
        request, pipelines = _lay_out_stages(request, request.stages, strategy)
    else:
        pipelines = 1
    default_workers = 0 if strategy and strategy.one_process else WORKERS
    return spec.build(
        workers=default_workers if request.workers is None else request.workers,
        ps=request.ps or 0,
        evaluator=request.evaluator,
        strategy=request.strategy or strategies.AUTO,
        devices=devices or (1 if request.devices is None else request.devices),
        separate_chief=not request.script or request.separate_chief,
        pipelines=pipelines,
    )


def _lay_out_stages(request: Request, stages: int, strategy: strategies.Strategy | None) -> tuple[Request, int]:
    """Return the request with workers and devices for its stages, and the number of pipelines.

    Each stage is a device of the only task, or a task in each pipeline.
    """
    spec.parse_count("stages", stages, 1, spec.MAX_TASKS)
    if strategy is None or not strategy.staged:
        raise UsageError(f"--stages {stages} without --strategy pipeline: add that, or leave --stages out")
    if request.workers == 0:
        if request.devices not in (None, stages):
            raise UsageError(
                f"--stages {stages} with --workers 0 and --devices {request.devices}: use --devices {stages}"
            )
        return replace(request, devices=stages), 1
    workers = stages - 1 if request.workers is None else request.workers
    tasks = 1 + spec.parse_count("workers", workers, 0, spec.MAX_TASKS)
    if tasks % stages:
        below = max(stages, tasks // stages * stages)
        raise UsageError(
            f"--stages {stages} with --workers {workers}: the chief and the workers are {tasks} tasks, which pipelines "
            f"of {stages} cannot share; use --workers {below - 1} or {below + stages - 1}, or --workers 0 for the "
            "devices of one task"
        )
    return replace(request, workers=workers), tasks // stages


def inherit_topology(request: Request, previous: ClusterSpec) -> Request:
    """Return a request with the topology of the run that it resumes, as far as it requests no other."""
    requested = strategies.requested(request.strategy or strategies.AUTO)
    evaluator = request.evaluator or bool(previous.of(Role.EVALUATOR))
    if request.stages is not None:
        return replace(request, evaluator=evaluator, strategy=requested.name if requested else previous.strategy)
    alone = requested is not None and requested.one_process
    previous_workers = len(previous.of(Role.WORKER))
    if requested and not alone and not previous_workers:
        previous_workers = WORKERS
    workers = request.workers
    if workers is None:
        workers = 0 if alone else previous_workers
    ps = request.ps
    if ps is None:
        ps = 0 if not workers or (requested and not requested.served) else len(previous.of(Role.PS))
    devices = request.devices
    if devices is None:
        devices = 1 if requested and requested.single_device else previous.devices
    strategy, stages = request.strategy or strategies.AUTO, None
    if not request.strategy and previous.kind.one_process == (workers == 0) and request.ps is None:
        # What the topology chose once it chooses again: the number of devices alone decides OneDevice or Mirrored.
        counts = (len(previous.of(Role.WORKER)), len(previous.of(Role.PS)), previous.devices)
        chosen = strategies.resolve(strategies.AUTO, *counts) == previous.kind
        strategy = strategies.AUTO if chosen else previous.strategy
        if previous.kind.staged and workers and previous_workers == workers:
            stages = previous.stages
    return replace(
        request,
        workers=workers,
        ps=ps,
        evaluator=evaluator,
        strategy=strategy,
        devices=devices,
        stages=stages,
    )


def check_hardware(strategy: str) -> None:
    """Check that the hardware of a strategy is here, or that a variable such as TPU_NAME says where it is.

    Raises:
        PrerequisiteError: neither.
    """
    requested = strategies.requested(strategy or strategies.AUTO)
    if requested is None or not requested.hardware:
        return
    patterns, name = DEVICE_FILES[requested.hardware], requested.hardware.upper()
    if not os.environ.get(f"{name}_NAME") and not any(any(Path("/").glob(each.lstrip("/"))) for each in patterns):
        raise PrerequisiteError(
            f"--strategy {strategy}: this machine has no {name} (no {' or '.join(patterns)}); run this where there is "
            f"one, or set {name}_NAME to one that this machine can reach"
        )


def elastic_record(typed: Request, request: Request, cluster: ClusterSpec) -> dict[str, Any]:
    """Return the part of `started.json` about lost workers; empty for a run that needs every task.

    Args:
        typed: the request without what it inherits.
        request: the request with what a resumed run was started with.
        cluster: of the run.

    Raises:
        UsageError: such a cluster cannot lose a worker.
    """
    least, workers = request.min_workers, len(cluster.of(Role.WORKER))
    if typed.min_workers is not None:
        _check_min_workers(typed.min_workers, workers, cluster)
    elif not cluster.kind.collective or cluster.kind.staged:
        least = None
    if least is None:
        if typed.grow:
            raise UsageError("--grow without --min-workers: say how many workers are enough, such as --min-workers 1")
        return {}
    return {"min_workers": min(least, workers), "grow": request.grow}


def _check_min_workers(least: int, workers: int, cluster: ClusterSpec) -> None:
    if not cluster.kind.collective or cluster.kind.staged:
        raise UsageError(
            f"--min-workers {least} with {cluster.strategy_class}: no task of it can be left out, or a lost one is "
            "already done without; leave it out"
        )
    if least > workers:
        raise UsageError(
            f"--min-workers {least} with --workers {workers}: expected at most as many; use --min-workers {workers} or "
            f"fewer, or --workers {least} or more"
        )


def check_elastic_batch(elastic: Mapping[str, Any], cluster: ClusterSpec, config: Mapping[str, Any]) -> None:
    """Check that any number of replicas that a run may come to have can share its global batch.

    Raises:
        UsageError: one cannot; the message names it, and a batch that fits all.
    """
    if not elastic or config.get("bitwise_elastic"):  # virtual shards need not be shared evenly
        return
    batch, each = config["global_batch"], cluster.devices * config.get("micro_batches", 1)
    numbers = range(elastic["min_workers"], len(cluster.of(Role.WORKER)) + 1)
    every = math.lcm(*((1 + number) * each for number in numbers))
    for number in reversed(numbers):
        replicas = (1 + number) * cluster.devices
        if batch % ((1 + number) * each):
            raise UsageError(
                f"--min-workers {elastic['min_workers']}: global batch {batch} is not divisible by the {replicas} "
                f"replicas of a run on {counted(number, 'worker')}, times micro-batches; use -- --global-batch "
                f"{-(-batch // every) * every}, or --bitwise-elastic {cluster.replicas} with a batch that it divides"
            )
