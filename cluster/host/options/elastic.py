"""Checks of `--min-workers` and `--grow`: whether a run could go on without some of its workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cluster.contract.run.records import Started
from cluster.contract.spec import MAX_TASKS, ClusterSpec, Role, parse_count
from cluster.host.options.request import Request
from cluster.system.errors import UsageError
from cluster.system.messages import counted


def parse(request: Request, cluster: ClusterSpec, recorded: Started) -> dict[str, Any]:
    """Return what `started.json` says of it; empty for a run that needs every task.

    Args:
        request: what is requested.
        cluster: of the run.
        recorded: what was requested when the run began, for one that goes on.

    Raises:
        UsageError: such a cluster cannot lose a worker, or the number is none.
    """
    fits = cluster.kind.collective and not cluster.kind.staged
    number = str(recorded.min_workers) if recorded.min_workers is not None and fits else ""
    grow = request.grow or (bool(number) and recorded.grow)
    if not (text := request.min_workers or number):
        if request.grow:
            raise UsageError("--grow without --min-workers: say how many workers are enough, such as --min-workers 1")
        return {}
    least, workers = parse_count("min-workers", text, 0, MAX_TASKS), len(cluster.of(Role.WORKER))
    if request.min_workers:
        _check(least, workers, cluster)
    return {"min_workers": min(least, workers), "grow": grow}


def _check(least: int, workers: int, cluster: ClusterSpec) -> None:
    if cluster.kind.served:
        raise UsageError(
            f"--min-workers {least} with parameter servers: training goes on there without a lost worker anyway, and "
            "it joins again by itself; leave it out"
        )
    if cluster.kind.staged:
        raise UsageError(
            f"--min-workers {least} with --strategy {cluster.strategy}: each task has a stage that no other has; leave "
            "it out"
        )
    if least > workers:
        raise UsageError(
            f"--min-workers {least} with --workers {workers}: expected at most as many; use --min-workers {workers} or "
            f"fewer, or --workers {least} or more"
        )
    if not cluster.kind.collective:
        raise UsageError(
            f"--min-workers {least} with {cluster.strategy_class}: one process has no worker to lose; leave it out"
        )


def check_batch(elastic: Mapping[str, Any], cluster: ClusterSpec, config: Mapping[str, Any]) -> None:
    """Check that any number of replicas that a run may come to have can share its global batch.

    Raises:
        UsageError: one cannot; the message names it, and what does.
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


def notes(elastic: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return what the caller should know of an elastic run."""
    if not elastic:
        return []
    least = counted(elastic["min_workers"], "worker")
    back = "are taken in at the next checkpoint" if elastic["grow"] else "wait for `invoke scale`"
    found = [f"goes on with {least} or more: those that miss the rendezvous are left out; returning ones {back}"]
    if not config.get("bitwise_elastic"):
        found.append("another number of workers sums in another order, which changes bits; see --bitwise-elastic")
    return found
