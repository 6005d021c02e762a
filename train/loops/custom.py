"""`--loop custom`: our own loop, many steps in one `tf.function`."""

import functools

from tensorflow import keras

from cluster.contract.recovery import step_record
from cluster.system import terminal
from train.context import TaskContext
from train.data.batches import VirtualShards
from train.data.feeds import train_feed
from train.elastic.shard_step import ElasticTrainStep
from train.loops import compiling
from train.loops.loop import Loop, Steps, Stop
from train.loops.parameter_server import AsynchronousSteps
from train.loops.steps import SynchronousSteps
from train.loops.training import Setup, Training
from train.model import masks
from train.patches import batch_normalization
from train.pipeline.pipeline_steps import PipelineSteps
from train.saving import snapshots


def prepare(context: TaskContext) -> Setup:
    """Prepare a training up to the restore of the newest checkpoint."""
    replicas = 1 if context.config.bitwise_elastic else context.strategy.num_replicas_in_sync
    with context.strategy.scope():
        batch_normalization.synchronize_batch_normalization(context.model, replicas)
    return Setup(context)


def rehearse_steps(setup: Setup) -> Steps:
    """Do one step in a standby process, silently, and undo it; return the steps, now traced and compiled."""
    setup.gather(0)
    steps = _synchronous(setup, 0)
    with terminal.silence(), snapshots.unchanged(setup.checkpoint.tree):
        steps(0, 1)
    setup.context.positions.clear()
    return steps


def train(setup: Setup, rehearsed: Steps | None = None) -> None:
    """Train from the newest checkpoint to the end or a stop; `rehearsed` are steps that have been traced already."""
    context, config = setup.context, setup.context.config
    first = setup.restore()
    pipeline = PipelineSteps(context, setup.policy) if context.spec.kind.staged else None
    if pipeline:
        steps: Steps = pipeline.run
    elif context.asynchronous:
        # Unroll, because a remote worker hangs in a loop that counts unmasked positions before another loop.
        train_step = context.new_train_step(setup.policy, unrolled=masks.may_begin_in(context.model))
        steps = AsynchronousSteps(context, train_step)
    else:
        steps = rehearsed or _synchronous(setup, first)
    if config.callbacks:
        with context.strategy.scope():  # callbacks ask the model for its optimizer
            # The base class's method: a model's override may take other arguments.
            compile_with = functools.partial(keras.Model.compile, context.model)
            compiling.compile_model(context, setup.policy.optimizer, compile_with)
    training = Training(setup, first, pipeline.evaluation if pipeline else context.new_evaluation)
    training.begin()
    loop = Loop(
        first,
        training.actions(batches=True),
        steps_per_loop=config.steps_per_loop,
        single=step_record.single_steps(context.run, context.generation, config.steps_per_loop, setup.gather),
    )
    stop = Stop.END if training.finished else loop.run(steps, training.request)
    training.end(loop.step, stop)


def _synchronous(setup: Setup, first: int) -> SynchronousSteps:
    context, config = setup.context, setup.context.config
    replicas = context.strategy.num_replicas_in_sync
    cut, train_step = None, context.new_train_step(setup.policy)
    if shards := config.bitwise_elastic:
        cut, parts = VirtualShards(shards, replicas), (context.model, setup.policy, context.objective)
        train_step = ElasticTrainStep(*parts, config.global_batch, shards, config.micro_batches, shards=cut)
    feed = train_feed(context.strategy, context.source, config, first, cut)
    return SynchronousSteps(context.strategy, train_step, feed, config.steps_per_loop, context.positions)
