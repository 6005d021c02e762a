"""From a model and a configuration to the blocks of each stage; the same in every task."""

from __future__ import annotations

import keras

from cluster.errors import UsageError
from train.config import TrainConfig
from train.pipeline import blocks
from train.pipeline.blocks import ModelBlock
from train.pipeline.partition import Plan, Stage, partition

SLOTS = {"adam": 2, "sgd": 1}
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
