"""One small training with any optimizer, precision, micro-batches and virtual shards, for what is measured of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tests.unit.measure.replicas import GLOBAL_BATCH, OBJECTIVE, SEED, new_model, strategy_called, weights_of

# isort: split
import keras

from train import strategy as strategies
from train.config import Optimizer, TrainConfig
from train.data import sources
from train.elastic.train_step import ElasticTrainStep
from train.elastic.virtual_shards import VirtualShards
from train.loops import outer, steps
from train.loops.train_step import TrainStep
from train.model import gradients, objectives, optimizers
from train.patches import batch_normalization

SHARDS, STEPS = 4, 4
PLAIN = Optimizer(name="sgd", learning_rate=0.5, momentum=0.0, warmup_steps=0)
CLIPPED = dataclasses.replace(PLAIN, clip_norm=0.05)
REGULARISED = functools.partial(new_model, 0.05)


@dataclasses.dataclass
class Training:
    """A training and what it trains."""

    train_step: TrainStep
    run: Any

    @property
    def scale(self) -> gradients.LossScale | None:
        return self.train_step.policy.loss_scale

    def trained(self) -> dict[str, Any]:
        """Do all steps; return the results."""
        result, model = self.run(0, STEPS, False), self.train_step.model
        return {
            "losses": result.losses.tolist(),
            "scores": result.scores.tolist(),
            "weights": weights_of(model),
            "weights_sha256": outer.weights_sha256(model),
            "averages": [one.numpy().tolist() for one in model.non_trainable_variables if "moving" in one.path],
            "skipped": self.scale.metrics()["skipped_steps"] if self.scale else 0,
            "dtypes": sorted({variable.dtype for variable in model.trainable_variables}),
            "computes": sorted({layer.compute_dtype for layer in model.layers}),
        }


def training(
    where: str,
    source: sources.Source,
    optimizer: Optimizer,
    precision: str = "fp32",
    *,
    micro_batches: int = 1,
    elastic: bool = False,
    model_of: Callable[[], keras.Model] = REGULARISED,
    objective: objectives.Objective = OBJECTIVE,
) -> Training:
    """Return a training of a small model, as a run with these settings has it."""
    strategy = strategy_called(where)
    replicas = strategy.num_replicas_in_sync
    config = TrainConfig(optimizer=optimizer, precision=precision)
    with strategy.scope(), strategies.policy(precision):
        model = model_of()
        if not elastic:
            batch_normalization.synchronize_batch_normalization(model, replicas)
        policy = optimizers.policy(config, optimizers.build_for(config, model))
    shards = VirtualShards(SHARDS, replicas) if elastic else None
    what = (model, policy, objective, GLOBAL_BATCH)
    train_step = (
        ElasticTrainStep(*what, SHARDS, micro_batches, shards=shards)
        if shards
        else TrainStep(*what, replicas, micro_batches)
    )
    feed = sources.train_feed(strategy, source, 0, GLOBAL_BATCH, SEED, shards, micro_batches)
    return Training(train_step, policy.around(steps.SynchronousSteps(strategy, train_step, feed, STEPS)))
