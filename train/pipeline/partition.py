"""Cuts a model into stages, by a pure function of the costs of its blocks.

A block is a part of the model between two places where it may be cut. The cut minimizes the time of the slowest stage,
which determines the speed of all, among the cuts whose stages fit their memory: the dynamic programme of PipeDream
(Harlap et al. 2018, arXiv:1806.03377, section 3.2), for stages of one device each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.system.errors import UsageError, nearest
from train.pipeline import schedule as schedules

PARTITIONS = ("flops", "measured")
"""Criteria of a cut: estimated operations, or measured time on this machine."""


@dataclass(frozen=True)
class Block:
    """A part of a model that is never cut.

    Attributes:
        layers: names of the layers, in order.
        seconds: time of the forward and backward of one micro-batch, or a proportional number, such as FLOPs.
        parameter_bytes: size of the weights.
        state_bytes: size of gradients and of the optimizer's variables.
        activation_bytes: memory that one micro-batch's forward keeps for its backward.
        output_bytes: size of one micro-batch's output to the next block.
    """

    layers: tuple[str, ...]
    seconds: float
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """How the stages run, as far as it affects their memory.

    Attributes:
        stages: number of stages.
        schedule: one of `schedule.SCHEDULES`.
        micro_batches: number of micro-batches of a step.
        remat: whether a stage keeps only its input and computes the rest again for the backward.
        memory_bytes: memory of each stage; None for no limit.
    """

    stages: int
    schedule: str = "gpipe"
    micro_batches: int = 1
    remat: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Stage:
    """A stage of the cut: the blocks from `first` to before `last`."""

    number: int
    first: int
    last: int
    seconds: float
    memory_bytes: int
    activation_bytes: int
    layers: tuple[str, ...]


def partition(blocks: Sequence[Block], plan: Plan, cut: Sequence[str] = ()) -> list[Stage]:
    """Return the stages: the best ones, or those of a given cut.

    Args:
        blocks: the model's blocks, in order.
        cut: the first layer of each stage but the first; empty: the cut whose slowest stage is fastest, and among
            equal ones the cut with the smallest earlier stages.
    """
    if plan.stages > len(blocks):
        raise UsageError(
            f"--stages {plan.stages}: this model has {len(blocks)} blocks that it can be cut between; use --stages "
            f"{len(blocks)} or fewer"
        )
    borders = _borders_of(blocks, plan, cut) if cut else _best(blocks, plan)
    if borders is None:
        raise UsageError(
            f"--stages {plan.stages}: no cut of this model fits {_mb(plan.memory_bytes or 0)} per stage: use more "
            "--stages, more --micro-batches or --remat"
        )
    stages = [
        Stage(
            number,
            first,
            last,
            sum(block.seconds for block in blocks[first:last]),
            memory_of(blocks, plan, number, first, last),
            _activations(blocks, plan, number, first, last),
            tuple(layer for block in blocks[first:last] for layer in block.layers),
        )
        for number, (first, last) in enumerate(itertools.pairwise(borders))
    ]
    if plan.memory_bytes is not None:
        for stage in stages:
            if stage.memory_bytes > plan.memory_bytes:
                raise UsageError(
                    f"stage {stage.number} ({stage.layers[0]} to {stage.layers[-1]}) needs about "
                    f"{_mb(stage.memory_bytes)} and has {_mb(plan.memory_bytes)}: use more --stages, more "
                    "--micro-batches or --remat"
                )
    return stages


def memory_of(blocks: Sequence[Block], plan: Plan, stage: int, first: int, last: int) -> int:
    """Return the maximum bytes that a stage of these blocks holds, without TensorFlow's own memory."""
    versions = schedules.weight_versions(plan.schedule, stage, plan.stages, plan.micro_batches)
    weights = sum(versions * block.parameter_bytes + block.state_bytes for block in blocks[first:last])
    return weights + _activations(blocks, plan, stage, first, last)


def _activations(blocks: Sequence[Block], plan: Plan, stage: int, first: int, last: int) -> int:
    held = schedules.in_flight(plan.schedule, stage, plan.stages, plan.micro_batches)
    kept = sum(block.activation_bytes for block in blocks[first:last])
    if plan.remat:
        return kept + held * (blocks[first - 1].output_bytes if first else 0)
    return held * kept


def _best(blocks: Sequence[Block], plan: Plan) -> list[int] | None:
    """Return the borders of the best cut, from 0 to the number of blocks; None if no cut fits the memory."""
    count = len(blocks)
    until = [0.0]
    for block in blocks:
        until.append(until[-1] + block.seconds)

    def fits(stage: int, first: int, last: int) -> bool:
        return plan.memory_bytes is None or memory_of(blocks, plan, stage, first, last) <= plan.memory_bytes

    # slowest[last]: time of the slowest stage in the best cut of the first `last` blocks into the stages so far.
    slowest = [0.0] + [math.inf] * count
    chosen: list[list[int]] = []
    for stage in range(plan.stages):
        following, origin = [math.inf] * (count + 1), [0] * (count + 1)
        for last in range(stage + 1, count - (plan.stages - 1 - stage) + 1):
            for first in range(stage, last):
                time = max(slowest[first], until[last] - until[first])
                if time < following[last] and fits(stage, first, last):
                    following[last], origin[last] = time, first
        slowest = following
        chosen.append(origin)
    if math.isinf(slowest[count]):
        return None
    borders = [count]
    for origin in reversed(chosen):
        borders.append(origin[borders[-1]])
    return borders[::-1]


def _borders_of(blocks: Sequence[Block], plan: Plan, cut: Sequence[str]) -> list[int]:
    begins = {block.layers[0]: number for number, block in enumerate(blocks)}
    inside = {layer: block.layers[0] for block in reversed(blocks) for layer in block.layers}
    borders = [0]
    for name in cut:
        if name not in inside:
            raise UsageError(f"--cut {name!r} is not a layer of this model{nearest(name, inside)}")
        if name not in begins or name == blocks[0].layers[0]:
            raise UsageError(
                f"--cut {name!r}: the model cannot be cut before this layer{nearest(inside[name], list(begins)[1:])}"
            )
        borders.append(begins[name])
    if borders != sorted(set(borders)):
        raise UsageError(f"--cut {','.join(cut)}: expected layers in the order of the model, each once")
    if len(borders) != plan.stages:
        raise UsageError(f"--cut {','.join(cut)} makes {len(borders)} stages, and --stages is {plan.stages}")
    return [*borders, len(blocks)]


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
