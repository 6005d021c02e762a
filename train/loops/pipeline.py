"""The inner loop of `--strategy pipeline`: many optimizer steps, each through all stages, in one `tf.function`.

Every task builds the whole model from the seed, so that its first weights are those of one device, and trains its own
stage of it. Where something needs the whole model, such as a checkpoint, the stages share what they have trained: so
checkpoints, exports and results are those of any other strategy.

Shapes: S steps of one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from train.context import TaskContext
from train.data import memory
from train.loops import steps, train_step
from train.loops.steps import LoopResult, Signals
from train.model import keras_compat
from train.model.gradients import GradientPolicy
from train.model.objectives import global_mean
from train.pipeline import blocks, edges, schedule
from train.pipeline.cut import cut
from train.pipeline.stage import Stage


class Pipeline:
    """This task's part of the pipeline: one stage of several tasks, or all stages where it trains alone."""

    def __init__(self, context: TaskContext, policy: GradientPolicy, signals: Callable[[bool, int], Signals]) -> None:
        """Cut the model. All tasks find the same cut.

        Raises:
            UsageError: the model cannot be cut so.
        """
        # It rewrites sums, and so changes their bits.
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
        self._context, self._policy, self._signals = context, policy, signals
        keras_compat.take_summed_gradients(policy.optimizer)
        spec, config = context.spec, context.config
        self._tasks = max(1, len(spec.members))
        self._task = spec.members.index(context.task) if spec.members else 0
        self._parts = cut(context.model, config, spec.stages, context.run)
        self._models = [blocks.stage_model(part, number) for number, part in enumerate(self._parts)]
        self._micro_batch = config.global_batch // config.micro_batches
        self._asynchronous = config.pipeline.schedule == "pipedream"
        arrays = context.source.arrays
        assert arrays is not None  # the plan refuses others
        self._examples = memory.load(arrays.train)
        self._programs = schedule.build(config.pipeline.schedule, spec.stages, config.micro_batches)
        carrier: edges.Edges = edges.LocalEdges() if self._tasks == 1 else edges.TaskEdges()
        own = range(spec.stages) if self._tasks == 1 else [self._task]
        self._stages = {number: self._stage(number, carrier) for number in own}
        self._loop, self._share = self._trace_loop(), self._trace_share()
        self._total = steps.total(context.gang)

    def run(self, first: int, count: int, stop: bool) -> LoopResult:
        """Do some optimizer steps: the inner loop of `outer.run`."""
        signals_3 = tf.constant(self._signals(stop, count).to_array())
        results_S2 = self._loop(tf.constant(first, tf.int64), tf.constant(count, tf.int64))
        flat = self._total(tf.concat([tf.reshape(results_S2, [-1]), signals_3], 0)).numpy()
        results_S2 = flat[:-3].reshape(-1, 2)[:count]
        return LoopResult(results_S2[:, 0], results_S2[:, 1], Signals.from_sum(flat[-3:]))

    def share(self) -> None:
        """Give every task what each stage has trained; all tasks call it after the same step."""
        if self._tasks > 1:
            self._share()

    def _stage(self, number: int, carrier: edges.Edges) -> Stage:
        config, spec = self._context.config, self._context.spec
        model = self._models[number]

        def update(sums: Sequence[tf.Tensor], at: int) -> tf.Tensor:
            return self._update(model.trainable_variables, sums, at)

        return Stage(
            model,
            number,
            spec.stages,
            self._micro_batch,
            carrier,
            features=self._features,
            loss=self._loss,
            update=update,
            remat=config.pipeline.remat,
            accumulates=config.micro_batches > 1 and not self._asynchronous,
            device=f"/device:CPU:{number}" if self._has_logical_cpus else None,
        )

    @property
    def _has_logical_cpus(self) -> bool:
        return self._context.spec.devices > 1 and not tf.config.list_physical_devices("GPU")

    def _batch(self, step: tf.Tensor, at: tf.Tensor) -> memory.Batch:
        config = self._context.config
        return memory.train_batch(
            self._examples,
            step,
            at,
            replica_batch=self._micro_batch,
            num_replicas=config.micro_batches,
            seed=config.seed,
        )

    def _features(self, step: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
        return train_step.as_input(self._context.model, self._batch(step, at).features)

    def _loss(self, outputs: tf.Tensor, step: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
        objective, batch = self._context.objective, self._batch(step, at)
        outputs = train_step.full_precision(outputs)
        # A micro-batch is a part of a step; PipeDream's is an update of its own.
        examples = self._micro_batch if self._asynchronous else self._context.config.global_batch
        loss = global_mean(objective.loss(batch.labels, outputs), batch.weights, examples)
        score = global_mean(objective.score(batch.labels, outputs), tf.ones_like(batch.weights), examples)
        return tf.stack([loss, score])

    def _trace_loop(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        steps_per_loop = self._context.config.steps_per_loop

        @tf.function(autograph=False)
        def loop(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
            def step(done: tf.Tensor, results_S2: tf.Tensor) -> tf.Tensor:
                with tf.control_dependencies([results_S2]):  # a step begins once the one before has ended
                    at = tf.identity(first + done)
                return tf.tensor_scatter_nd_update(results_S2, [[done]], [self._step(at)])

            return train_step.repeat(count, step, tf.zeros([steps_per_loop, 2]))

        return loop

    def _step(self, step: tf.Tensor) -> tf.Tensor:
        """Return what one step gives this task, `[2] float32`: loss and score on the last stage."""
        for stage in self._stages.values():
            stage.begin(step)
        with tf.control_dependencies([step]):
            self._updates_before = tf.identity(self._policy.optimizer.iterations.value)
        order = [each for each in schedule.interleave(self._programs) if each[0] in self._stages]
        computes = [each for each in order if each[1].action is not schedule.Action.UPDATE]
        for number, instruction in order if self._asynchronous else computes:
            self._stages[number].execute(instruction)
        if not self._asynchronous:
            self._norm = self._global_norm() if self._policy.clip_norm else None
            for number, instruction in order:
                if instruction.action is schedule.Action.UPDATE:
                    self._stages[number].execute(instruction)
        results = [stage.end() for stage in self._stages.values()]
        share = self._context.config.micro_batches if self._asynchronous else 1
        return tf.add_n(results) / share

    def _update(self, variables: Sequence[keras.Variable], sums: Sequence[tf.Tensor], at: int) -> tf.Tensor:
        """Apply a stage's gradients; return 0 once that is done, or NaN where they are not finite."""
        gradients = list(sums)
        if limit := self._policy.clip_norm:
            gradients = tf.clip_by_global_norm(gradients, limit, use_norm=self._norm)[0]
        # Stages of one process share the optimizer, which counts every update of any of them.
        done = at if self._asynchronous else 0
        self._policy.optimizer.iterations.assign(self._updates_before + done)
        self._policy.optimizer.apply(gradients, variables)
        with tf.control_dependencies([self._policy.optimizer.iterations.value.read_value()]):
            return keras_compat.nan_if_broken(tf.zeros([]), gradients)

    def _global_norm(self) -> tf.Tensor:
        """Return the norm of all stages' gradients, with the bits of `tf.linalg.global_norm` on one device."""
        halves = {
            id(variable): tf.nn.l2_loss(gradient)
            for number, stage in self._stages.items()
            for variable, gradient in zip(self._models[number].trainable_variables, stage.sums, strict=True)
        }
        if self._tasks > 1:
            for owner in range(self._tasks):
                variables = self._models[owner].trainable_variables
                own = tf.stack([halves[id(each)] for each in variables]) if owner == self._task else None
                spec = tf.TensorSpec([len(variables)], tf.float32)
                (shared,) = edges.broadcast([own], [spec], owner, self._task, self._tasks, edges.NORMS)
                halves |= {id(each): half for each, half in zip(variables, tf.unstack(shared), strict=True)}
        ordered = [halves[id(variable)] for variable in self._context.model.trainable_variables]
        return tf.sqrt(tf.reduce_sum(tf.stack(ordered)) * 2.0)

    def _trace_share(self) -> Callable[[], tf.Tensor]:
        shared = [self._state(number) for number in range(len(self._parts))]

        @tf.function(autograph=False)
        def share() -> tf.Tensor:
            done: list[tf.Tensor] = []
            for owner, variables in enumerate(shared):
                own = [tf.identity(variable) for variable in variables] if owner == self._task else []
                specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
                received = edges.broadcast(own, specs, owner, self._task, self._tasks, edges.STATE)
                if owner == self._task:
                    done += received
                else:
                    done += [one.assign(value) for one, value in zip(variables, received, strict=True)]
            with tf.control_dependencies(done):  # nothing else keeps a send in the graph
                return tf.zeros([])

        return share

    def _state(self, number: int) -> list[tf.Variable]:
        """Return what a stage changes as it trains: its layers' variables, and the optimizer's for each of them."""
        own = list(self._models[number].variables)
        trained = {id(variable) for variable in self._models[number].trainable_variables}
        count = len(self._context.model.trainable_variables)
        for slots in vars(self._policy.optimizer).values():
            if isinstance(slots, list) and len(slots) == count and isinstance(slots[0], keras.Variable):
                pairs = zip(slots, self._context.model.trainable_variables, strict=True)
                own += [slot for slot, variable in pairs if id(variable) in trained]
        unique = {id(variable): variable for variable in own if variable.dtype != "uint32"}  # of seeds, which stay
        return [variable.value for variable in unique.values()]
