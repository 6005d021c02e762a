"""Everything that both loops need in one generation of a task, built once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow import keras

from cluster.contract.recovery.step_record import StepRecord
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.spec import ClusterSpec, Role, Task
from train.config import TrainConfig
from train.data.sources import Source
from train.loops import evaluation
from train.loops.train_step import TrainStep
from train.model import optimizers
from train.model.gradients import GradientPolicy
from train.model.objectives import Objective
from train.pipeline.stage_models import TaskStages
from train.telemetry.positions import Positions


@dataclass(frozen=True)
class TaskContext:
    """A task's configuration, cluster, model and data.

    Attributes:
        strategy: the strategy in whose scope `model` was built.
        new_model: builds the same architecture with plain variables, outside the strategy.
        stop: set when the task must stop.
        task_stages: the stages of a pipeline; None if the model is not cut.
        gang: the strategy for collectives between all tasks; with stages it differs from `strategy`.
    """

    run: RunFolder
    task: Task
    spec: ClusterSpec
    config: TrainConfig
    source: Source
    objective: Objective
    strategy: tf.distribute.Strategy
    gang: tf.distribute.Strategy
    model: keras.Model
    new_model: Callable[[], keras.Model]
    heartbeat: HeartbeatWriter
    stop: threading.Event
    task_stages: TaskStages | None = None
    positions: Positions = field(default_factory=Positions)

    @property
    def chief(self) -> bool:
        """Whether this task is the chief, the only task that writes shared files."""
        return self.task.role == Role.CHIEF

    @property
    def generation(self) -> int:
        """Number of earlier starts of the cluster."""
        return self.heartbeat.current.generation

    @property
    def asynchronous(self) -> bool:
        """Whether workers update the weights without waiting for each other."""
        return not self.spec.kind.synchronous

    @property
    def total_steps(self) -> int:
        return self.config.total_steps(self.source.train_examples)

    def epoch_of(self, step: int) -> int:
        """Return the 0-based epoch of the step that follows `step` steps.

        A batch that spans two epochs belongs to the first. So some epochs have one more step than others, and epochs
        never drift away from the examples.
        """
        return step * self.config.global_batch // self.source.train_examples

    def epoch_begin(self, step: int) -> int:
        """Return the number of steps before the epoch of the step that follows `step`."""
        return -(-self.epoch_of(step) * self.source.train_examples // self.config.global_batch)

    def epoch_end(self, step: int) -> int:
        """Return the number of steps at the end of the epoch of the step that follows `step`."""
        return -(-(self.epoch_of(step) + 1) * self.source.train_examples // self.config.global_batch)

    def new_policy(self) -> GradientPolicy:
        with self.strategy.scope():
            build = self.task_stages.build_optimizer if self.task_stages else None
            optimizer = optimizers.build_for_model(self.config, self.model, self.total_steps, build)
            return optimizers.build_policy(self.config, optimizer)

    def new_train_step(self, policy: GradientPolicy, *, unrolled: bool = False) -> TrainStep:
        """Build a training step; if `unrolled`, its graph repeats the operations per micro-batch instead of looping."""
        config, replicas = self.config, 1 if self.asynchronous else self.strategy.num_replicas_in_sync
        sizes = config.global_batch, replicas, config.micro_batches
        as_function = replicas == 1 and config.micro_batches > 1 and not self.asynchronous
        return TrainStep(self.model, policy, self.objective, *sizes, unrolled=unrolled, as_function=as_function)

    def worker_records(self) -> list[StepRecord]:
        """Return the step record of each worker under parameter servers; empty under other strategies."""
        workers = self.spec.of(Role.WORKER) if self.asynchronous else ()
        return [StepRecord(self.run, worker.name, self.generation) for worker in workers]

    def new_evaluation(self) -> Callable[[], dict[str, float]]:
        # Under parameter servers the chief evaluates alone, as it can read every variable.
        shared = None if self.asynchronous else self.gang
        batch = self.config.evaluation_batch
        return evaluation.new_evaluation(shared, self.model, self.objective, self.source, batch, self.positions)
