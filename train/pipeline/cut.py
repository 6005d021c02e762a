"""From a model and a configuration to the blocks of each stage; the same in every task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import masks, optimizers
from train.pipeline import blocks, measure, parts, schedule
from train.pipeline.blocks import ModelBlock
from train.pipeline.partition import Block, Plan, Stage, limit, partition


@dataclass(frozen=True)
class Cut:
    """A model in stages.

    Attributes:
        blocks: the model's blocks, from `blocks.chain`.
        costs: the cost of each block.
        plan: how the stages run.
        stages: the blocks of each stage.
        parts: the model of each stage, and the variables that it uses.
    """

    blocks: list[ModelBlock]
    costs: list[Block]
    plan: Plan
    stages: list[Stage]
    parts: list[parts.Part]


def find(
    model: keras.Model,
    config: TrainConfig,
    stages: int,
    *,
    memory_bytes: int | None = None,
    seconds: Sequence[float] = (),
    layers: Sequence[str] | None = None,
    pipelines: int = 1,
) -> Cut:
    """Return the best cut of a model, or the one that its configuration names.

    Args:
        memory_bytes: memory of each stage; None for no limit.
        seconds: time of each block; empty to estimate it by FLOPs.
        layers: the first layer of each stage but the first; None for those of the configuration.
        pipelines: number of pipelines that share each global batch.
    """
    chain, pipeline = blocks.chain(model), config.pipeline
    if masks.of(model.outputs[0]) is not None:
        raise UsageError(
            f"--stages {stages}: a mask reaches the output of {model.layers[-1].name!r}, and no stage knows the "
            "unmasked positions of the whole batch; leave the mask out, or use another strategy"
        )
    names = [name.strip() for name in pipeline.cut.split(",") if name.strip()] if layers is None else layers
    _check_chain(model, chain, stages, names)
    plan = Plan(stages, pipeline.schedule, config.micro_batches, pipeline.remat, memory_bytes)
    copies = _slots(config) + (config.micro_batches > 1)  # a gradient, and the sum of the previous ones
    micro_batch = config.global_batch // (pipelines * config.micro_batches)
    costs = blocks.estimate(chain, micro_batch, copies)
    if len(seconds) == len(costs):
        costs = [dataclasses.replace(cost, seconds=measured) for cost, measured in zip(costs, seconds, strict=True)]
    chosen = partition(costs, plan, names)
    built = parts.build(model, [chain[stage.first : stage.last] for stage in chosen], micro_batch)
    parts.check(built, remat=pipeline.remat, asynchronous=pipeline.schedule == "pipedream", pipelines=pipelines)
    return Cut(chain, costs, plan, chosen, built)


def cut(
    model: keras.Model, config: TrainConfig, stages: int, run: RunFolder | None = None, pipelines: int = 1
) -> list[parts.Part]:
    """Return the model's stages as planned, according to the record of the run; see `find`."""
    planned = records.read(run.stages, records.stages, None) if run else None
    if planned is None and config.pipeline.partition_by == "measured":
        raise UsageError("--partition-by measured: no times of the blocks are recorded; start the run with `invoke up`")
    planned = planned or {"cut": [], "seconds": []}
    # A resumed run may have another number of stages.
    layers = planned["cut"] if len(planned["cut"]) == stages - 1 else None
    return find(model, config, stages, layers=layers, seconds=planned["seconds"], pipelines=pipelines).parts


def describe(
    model: keras.Model,
    config: TrainConfig,
    stages: int,
    *,
    pipelines: int = 1,
    memory_bytes: int | None = None,
    record: Any = None,
) -> dict[str, Any]:
    """Describe the stages for a plan, with the record by which the tasks cut the model.

    Args:
        pipelines: number of pipelines that share each global batch.
        memory_bytes: memory of each stage; None for no limit.
        record: the record of an earlier generation, whose measured times remain valid; None if there is none.
    """
    measured = config.pipeline.partition_by == "measured"
    conditions = measure.conditions(config) | {"pipelines": str(pipelines)}
    seconds: list[float] = []
    if measured:
        find(model, config, stages, pipelines=pipelines)  # fails before measuring if the model cannot be cut
        still_valid = record and record["measured_for"] == conditions
        micro_batch = config.global_batch // (pipelines * config.micro_batches)
        seconds = record["seconds"] if still_valid else measure.block_seconds(blocks.chain(model), micro_batch)
    result = find(model, config, stages, memory_bytes=memory_bytes, seconds=seconds, pipelines=pipelines)
    return {
        "partition_by": config.pipeline.partition_by,
        "memory_bytes": memory_bytes,
        "limited_by": limit(result.costs, result.plan, result.stages),
        "stages": [_describe(result, stage) for stage in result.stages],
        "record": {
            "measured_for": conditions,
            "cut": [stage.layers[0] for stage in result.stages[1:]],
            "seconds": seconds,
        },
    }


def _describe(result: Cut, stage: Stage) -> dict[str, Any]:
    """Describe a stage for a plan. `cost` is that of a micro-batch in seconds or FLOPs, `share` its share of all."""
    plan, costs = result.plan, result.costs[stage.first : stage.last]
    weights = sum(cost.parameter_bytes for cost in costs)
    return {
        "stage": stage.number,
        "first": stage.layers[0],
        "last": stage.layers[-1],
        "layers": list(stage.layers),
        "parameters": weights // 4,
        "state_bytes": weights + sum(cost.state_bytes for cost in costs),
        "in_flight": schedule.in_flight(plan.schedule, stage.number, plan.stages, plan.micro_batches),
        "micro_batch_bytes": sum(cost.activation_bytes for cost in costs),
        "activation_bytes": stage.activation_bytes,
        "memory_bytes": stage.memory_bytes,
        "share": stage.seconds / (sum(other.seconds for other in result.stages) or 1.0),
        "cost": stage.seconds,
    }


def _check_chain(model: keras.Model, chain: Sequence[ModelBlock], stages: int, names: Sequence[str]) -> None:
    borders = {block.names[0] for block in chain}
    inside = [name for name in names if name not in borders]
    places = [blocks.crossing(model, name) for name in inside]
    if stages > len(chain) == 1:
        places.append(blocks.crossing(model))
    for layer, makers in filter(None, places):
        crossed = f"the outputs of {' and '.join(repr(name) for name in makers)} cross the cut before {layer!r}"
        option = f"--cut {layer!r}" if layer in inside else f"--stages {stages}"
        raise UsageError(f"{option}: several tensors cross there: {crossed}, and only one may")


def _slots(config: TrainConfig) -> int:
    """Return the number of variables that the optimizer keeps for each weight."""
    weight = keras.Variable(tf.zeros([2, 3]))
    optimizer = optimizers.build(config)
    optimizer.build([weight])
    return sum(tuple(variable.shape) == (2, 3) for variable in optimizer.variables)
