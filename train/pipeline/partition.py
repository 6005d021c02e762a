"""Where a model is cut into stages: a pure function of what its blocks cost, that needs no device.

A block is a part of the model between two places where it may be cut. The cut minimises the time of the slowest stage,
which sets the pace of all, among the cuts whose stages fit their memory: the dynamic programme of PipeDream (Harlap et
al. 2018, arXiv:1806.03377, section 3.2), for stages of one device each.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.system.errors import UsageError, nearest
from train.pipeline import schedule as schedules

PARTITIONS = ("flops", "measured")
"""By what a cut can be chosen: an estimate, or what blocks take on this machine."""


@dataclass(frozen=True)
class Block:
    """A part of a model that is never cut.

    Attributes:
        layers: their names, in order.
        seconds: forward and backward of one micro-batch, or anything in proportion to it, such as FLOPs.
        parameter_bytes: of the weights.
        state_bytes: of what is kept beside each weight: gradients and the optimizer's variables.
        activation_bytes: what one micro-batch's forward keeps for its backward.
        output_bytes: what one micro-batch sends to the next block.
    """

    layers: tuple[str, ...]
    seconds: float
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """How the stages run, as far as it decides what they hold.

    Attributes:
        stages: how many.
        schedule: one of `schedule.SCHEDULES`.
        micro_batches: of a step.
        remat: whether a stage keeps its input alone and computes the rest again for the backward.
        memory_bytes: what each stage may hold; None: any amount.
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
        blocks: of the model, in order.
        plan: how they run.
        cut: the first layer of each stage but the first; none: the cut whose slowest stage is fastest, of equal ones
            that with the smallest earlier stages.

    Raises:
        UsageError: there are more stages than blocks, the cut is none, or a stage exceeds its memory.
    """
    if plan.stages > len(blocks):
        raise UsageError(
            f"--stages {plan.stages}: this model has {len(blocks)} blocks that it can be cut between; use --stages "
            f"{len(blocks)} or fewer"
        )
    borders = _borders_of(blocks, plan, cut) if cut else _best(blocks, plan)
    if borders is None:
        raise UsageError(_too_large(blocks, plan))
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
                    f"{_mb(stage.memory_bytes)}, and has {_mb(plan.memory_bytes)}: use more --stages, more "
                    "--micro-batches or --remat"
                )
    return stages


def memory_of(blocks: Sequence[Block], plan: Plan, stage: int, first: int, last: int) -> int:
    """Return the bytes that a stage of these blocks holds at most, without what TensorFlow itself takes."""
    versions = schedules.weight_versions(plan.schedule, stage, plan.stages, plan.micro_batches)
    weights = sum(versions * block.parameter_bytes + block.state_bytes for block in blocks[first:last])
    return weights + _activations(blocks, plan, stage, first, last)


def _activations(blocks: Sequence[Block], plan: Plan, stage: int, first: int, last: int) -> int:
    held = schedules.in_flight(plan.schedule, stage, plan.stages, plan.micro_batches)
    kept = sum(block.activation_bytes for block in blocks[first:last])
    if plan.remat:
        return kept + held * (blocks[first - 1].output_bytes if first else 0)
    return held * kept


def limit(blocks: Sequence[Block], plan: Plan, stages: Sequence[Stage]) -> str:
    """Return what keeps the slowest stage from being faster: `time`, of the blocks, or `memory`, of the stages."""
    free = partition(blocks, dataclasses.replace(plan, memory_bytes=None))
    return "memory" if max(each.seconds for each in free) < max(each.seconds for each in stages) else "time"


def imbalance(stages: Sequence[Stage]) -> float:
    """Return by how much the slowest stage is slower than their mean: 0 where all are equal."""
    mean = sum(stage.seconds for stage in stages) / len(stages)
    return max(stage.seconds for stage in stages) / mean - 1 if mean else 0.0


def _best(blocks: Sequence[Block], plan: Plan) -> list[int] | None:
    """Return the borders of the best cut, from 0 to the number of blocks; None where no cut fits the memory."""
    count = len(blocks)
    until = [0.0]
    for block in blocks:
        until.append(until[-1] + block.seconds)

    def fits(stage: int, first: int, last: int) -> bool:
        return plan.memory_bytes is None or memory_of(blocks, plan, stage, first, last) <= plan.memory_bytes

    # slowest[last]: of the best cut of the first `last` blocks into the stages so far, the time of its slowest one.
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


def _too_large(blocks: Sequence[Block], plan: Plan) -> str:
    """Return the error of a memory that no cut fits."""
    return (
        f"--stages {plan.stages}: no cut of this model fits {_mb(plan.memory_bytes or 0)} a stage; the best one needs "
        f"about {_mb(_least_memory(blocks, plan))}: use more --stages, more --micro-batches or --remat"
    )


def _least_memory(blocks: Sequence[Block], plan: Plan) -> int:
    """Return the least memory a stage with which there is a cut: one of the sizes that a stage can have."""
    ranges = [(first, last) for first in range(len(blocks)) for last in range(first + 1, len(blocks) + 1)]
    sizes = sorted({memory_of(blocks, plan, stage, *each) for each in ranges for stage in range(plan.stages)})

    def enough(memory_bytes: int) -> bool:
        return _best(blocks, dataclasses.replace(plan, memory_bytes=memory_bytes)) is not None

    return sizes[bisect.bisect_left(sizes, True, key=enough)]


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
