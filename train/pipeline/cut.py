"""From a model and a configuration to the blocks of each stage; the same in every task."""

from __future__ import annotations

import math
from typing import Any

import keras

from cluster.errors import UsageError
from train.config import TrainConfig
from train.pipeline import blocks
from train.pipeline.blocks import ModelBlock
from train.pipeline.partition import Plan, Stage, partition
from train.pipeline.schedule import in_flight

SLOTS = {"adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "sgd": 1}
"""Variables that each optimizer keeps beside a weight."""


def stages_of(model: keras.Model, config: TrainConfig, stages: int) -> tuple[list[ModelBlock], list[Stage]]:
    """Return a model's blocks, and the stages that it is cut into.

    Raises:
        UsageError: it cannot be cut so, or cannot be trained in stages.
    """
    if model.losses:
        raise UsageError("--strategy pipeline: the model has losses of its own (regularisation), which stages have not")
    chain = blocks.chain(model)
    pipeline = config.pipeline
    if pipeline.remat and any(isinstance(each, keras.layers.BatchNormalization) for each in model._flatten_layers()):
        raise UsageError(
            "--remat: the model has BatchNormalization, whose averages would count every batch twice; leave it out"
        )
    plan = Plan(stages, pipeline.schedule, config.micro_batches, pipeline.remat)
    costs = blocks.estimate(chain, config.global_batch // config.micro_batches, SLOTS[config.optimizer.name])
    names = [name.strip() for name in pipeline.cut.split(",") if name.strip()]
    return chain, partition(costs, plan, names)


def cut(model: keras.Model, config: TrainConfig, stages: int) -> list[list[ModelBlock]]:
    """Return the blocks of each stage; for the rest see `stages_of`."""
    chain, found = stages_of(model, config, stages)
    return [chain[stage.first : stage.last] for stage in found]


def describe(model: keras.Model, config: TrainConfig, stages: int) -> list[dict[str, Any]]:
    """Return what a plan shows of each stage; `share` is its part of the time, by its floating-point operations."""
    chain, found = stages_of(model, config, stages)
    total = sum(stage.seconds for stage in found) or 1.0
    pipeline = config.pipeline
    return [
        {
            "stage": stage.number,
            "first": stage.layers[0],
            "last": stage.layers[-1],
            "layers": list(stage.layers),
            "parameters": sum(
                math.prod(variable.shape)
                for block in chain[stage.first : stage.last]
                for variable in block.trainable_variables
            ),
            "share": stage.seconds / total,
            "in_flight": in_flight(pipeline.schedule, stage.number, stages, config.micro_batches),
            "activation_bytes": stage.activation_bytes,
        }
        for stage in found
    ]
