"""Checks whether a configuration fits a cluster, and derives its precision and learning rate."""

import math
from collections.abc import Mapping
from typing import Any

from cluster.contract import strategies
from cluster.contract.spec import ClusterSpec
from cluster.system.errors import UsageError
from cluster.system.messages import counted, either

SCALINGS = ("none", "linear", "sqrt")
"""The rules by which a learning rate scales with the global batch."""


def check_global_batch(global_batch: int, divisor: int, what: str = "replicas") -> None:
    """Check that all replicas, or shards, get equally many examples; the error suggests the nearest valid batches."""
    if global_batch % divisor == 0 and global_batch > 0:
        return
    below, above = global_batch // divisor * divisor, (global_batch // divisor + 1) * divisor
    use = f"{below} or {above}" if below > 0 else str(above)
    problem = f"global_batch={global_batch} is not divisible by {divisor} {what}"
    raise UsageError(f"{problem}; use {use}: -- --global-batch {above}")


def check_micro_batches(global_batch: int, replicas: int, micro_batches: int, what: str = "replicas") -> None:
    """Check that each replica, or virtual shard, can cut its batch into micro-batches of equal size."""
    check_global_batch(global_batch, replicas, what)
    batch = global_batch // replicas
    if batch % micro_batches:
        fitting = [number for number in range(1, batch + 1) if batch % number == 0]
        near = sorted(sorted(fitting, key=lambda number: abs(number - micro_batches))[:3])
        problem = f"does not divide the {counted(batch, 'example')} of each of the {replicas} {what}"
        raise UsageError(f"--micro-batches {micro_batches} {problem}; use {either([*map(str, near)])}")


def check_shards(cluster: ClusterSpec, shards: int) -> None:
    """Check that a cluster can train on `--bitwise-elastic` virtual shards."""
    if why := cluster.kind.no_virtual_shards:
        raise UsageError(f"--bitwise-elastic {shards}: {cluster.strategy_class} {why}; use another strategy")
    if cluster.replicas > shards:
        problem = f"{cluster.replicas} replicas share {shards} virtual shards, and each needs one"
        use = f"use --bitwise-elastic {cluster.replicas} or more, or fewer tasks"
        raise UsageError(f"--bitwise-elastic {shards}: {problem}; {use}")


def check_stages(cluster: ClusterSpec, config: dict[str, Any], previous: Mapping[str, Any] | None = None) -> None:
    """Check that the stages of a configuration fit the cluster, and that the rest of it works with stages.

    `previous` is the earlier configuration of a resumed run; None for a new run.
    """
    pipeline = config.get("pipeline", {})
    if not cluster.kind.staged:
        changed = pipeline.get("schedule", "gpipe") != "gpipe" or pipeline.get("remat") or pipeline.get("cut")
        new = previous is None or previous.get("pipeline") != pipeline
        if new and changed:
            raise UsageError("--schedule, --remat and --cut are for --strategy pipeline: add that, or leave them out")
        return
    for option, default in {"loop": "custom", "source": "memory"}.items():
        if (value := config.get(option, default)) != default:
            problem = f"--{option} {value} with --strategy pipeline, which has no such training yet"
            raise UsageError(f"{problem}: use --{option} {default}")
    if (callbacks := config.get("callbacks")) and cluster.members:
        why = "none has the whole model that callbacks are given; use --workers 0, or leave it out"
        raise UsageError(f"--callbacks {callbacks} with --strategy pipeline on {len(cluster.members)} tasks: {why}")
    if ":" in (name := config.get("optimizer", {}).get("name", "")):
        use = "use an optimizer of Keras, such as adam"
        raise UsageError(f"--optimizer.name {name} with --strategy pipeline, whose stages update apart: {use}")
    if pipeline.get("schedule") == "pipedream":
        if cluster.pipelines > 1:
            pipelines = f"{cluster.pipelines} pipelines, each with separate weights"
            raise UsageError(f"--schedule pipedream with {pipelines}: use 1f1b")
        if config.get("precision") == "fp16":
            raise UsageError("--precision fp16 with --schedule pipedream: each stage would scale the loss by itself")
        if pipeline.get("remat"):
            raise UsageError("--remat with --schedule pipedream: the weights of the forward would be gone; use gpipe")
        if config.get("optimizer", {}).get("clip_norm"):
            why = "no stage waits for the others' norms"
            raise UsageError(f"--optimizer.clip-norm with --schedule pipedream: {why}; use 1f1b")


def check_precision(cluster: ClusterSpec, precision: str) -> None:
    """Check that a cluster can train in a precision."""
    if precision == "fp16" and (why := cluster.kind.no_fp16):
        raise UsageError(f"--precision fp16: {cluster.strategy_class} {why}; use --precision bf16")


def precision_of(strategy: str, precision: str) -> str:
    """Return the precision in which layers compute under a strategy: on a TPU bfloat16, for its matrix units."""
    return strategies.get(strategy).layers or precision


def scale_rate(rate: float, rule: str, global_batch: int, base_batch: int) -> float:
    """Return the learning rate at a global batch, by one of `SCALINGS`, from the rate found for `base_batch`."""
    ratio = global_batch / base_batch
    return rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
