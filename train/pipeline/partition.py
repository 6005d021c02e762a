"""Partitions of a model: which of its blocks each stage has, by a pure function of the blocks' costs.

A block is a part of the model between two places where it may be cut. The best partition minimizes the time of the
slowest stage, which determines the speed of all, among those whose stages fit their memory: the dynamic programme of
PipeDream (Harlap et al. 2018, arXiv:1806.03377, section 3.2), for stages of one device each.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.system.errors import UsageError, nearest
from cluster.system.messages import size
from train.pipeline import schedule as schedules


@dataclass(frozen=True)
class BlockCost:
    """Costs of a block; all but those of parameters and of state (gradients, optimizer) are for one micro-batch."""

    layers: tuple[str, ...]
    flops: float
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Constraints:
    """The number of stages, and how they run, as far as it affects their memory; None for unlimited memory."""

    stages: int
    schedule: str = "gpipe"
    micro_batches: int = 1
    remat: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True)
class StageCost:
    """The blocks from `first` to before `last` as a stage, and its costs."""

    number: int
    first: int
    last: int
    blocks: tuple[BlockCost, ...]
    in_flight: int
    """Number of micro-batches whose activations the stage holds."""
    activation_bytes: int
    memory_bytes: int
    """Peak memory of the stage, without TensorFlow's own."""

    @property
    def flops(self) -> float:
        return sum(block.flops for block in self.blocks)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer for block in self.blocks for layer in block.layers)


def partition(blocks: Sequence[BlockCost], constraints: Constraints, cut: Sequence[str] = ()) -> list[StageCost]:
    """Return the stages of the best partition of a model's blocks, in order, or of the one that `cut` gives.

    `cut` has the first layer of each stage after the first; empty: the partition whose slowest stage is fastest, and
    among equal ones the one with the smallest earlier stages.
    """
    count, memory_bytes = constraints.stages, constraints.memory_bytes
    if count > len(blocks):
        raise UsageError(
            f"--stages {count}: this model has {len(blocks)} blocks that it can be cut between; use --stages "
            f"{len(blocks)} or fewer"
        )
    borders = _find_borders(blocks, count, cut) if cut else _find_best_borders(blocks, constraints)
    if borders is None:
        raise UsageError(
            f"--stages {count}: no cut of this model fits {size(memory_bytes or 0)} per stage: use more "
            "--stages, more --micro-batches or --remat"
        )
    pairs = enumerate(itertools.pairwise(borders))
    stages = [compute_stage(blocks, constraints, number, first, last) for number, (first, last) in pairs]
    for stage in stages:
        if memory_bytes is not None and stage.memory_bytes > memory_bytes:
            raise UsageError(
                f"stage {stage.number} ({stage.layers[0]} to {stage.layers[-1]}) needs about "
                f"{size(stage.memory_bytes)} and has {size(memory_bytes)}: use more --stages, more "
                "--micro-batches or --remat"
            )
    return stages


def compute_stage(
    blocks: Sequence[BlockCost], constraints: Constraints, number: int, first: int, last: int
) -> StageCost:
    """Return the costs of stage `number` if it has the blocks from `first` to before `last`."""
    in_flight = schedules.in_flight(constraints.schedule, number, constraints.stages, constraints.micro_batches)
    parts = tuple(blocks[first:last])
    activation_bytes = sum(block.activation_bytes for block in parts)
    if constraints.remat:
        activation_bytes += in_flight * (blocks[first - 1].output_bytes if first else 0)
    else:
        activation_bytes *= in_flight
    versions = in_flight if constraints.schedule == "pipedream" else 1  # of the weights
    weights = sum(versions * block.parameter_bytes + block.state_bytes for block in parts)
    return StageCost(number, first, last, parts, in_flight, activation_bytes, weights + activation_bytes)


def _find_best_borders(blocks: Sequence[BlockCost], constraints: Constraints) -> list[int] | None:
    count, limit = len(blocks), constraints.memory_bytes
    until = list(itertools.accumulate((block.flops for block in blocks), initial=0.0))

    def fits(stage: int, first: int, last: int) -> bool:
        return limit is None or compute_stage(blocks, constraints, stage, first, last).memory_bytes <= limit

    # slowest[last]: time of the slowest stage in the best partition of the first `last` blocks into the stages so far.
    slowest = [0.0] + [math.inf] * count
    chosen: list[list[int]] = []
    for stage in range(constraints.stages):
        following, origin = [math.inf] * (count + 1), [0] * (count + 1)
        for last in range(stage + 1, count - (constraints.stages - 1 - stage) + 1):
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


def _find_borders(blocks: Sequence[BlockCost], stages: int, cut: Sequence[str]) -> list[int]:
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
    if len(borders) != stages:
        raise UsageError(f"--cut {','.join(cut)} makes {len(borders)} stages, and --stages is {stages}")
    return [*borders, len(blocks)]
