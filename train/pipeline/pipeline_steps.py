"""The inner loop of `--strategy pipeline`: many optimizer steps, each through all stages, in one `tf.function`.

Every task holds one stage of the model (`train/pipeline/stage_models.py`). R pipelines of equal stages train on
parts of each global batch and add up the gradients of equal stages before the single update of a step.

Shapes: S steps of one loop; N batches and M means of an evaluation.
"""

import functools
import operator
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from cluster.contract.run.records import Place
from train.context import TaskContext
from train.data import feeds
from train.data.batches import VirtualShards, eval_batches
from train.loops import evaluation, steps, train_step
from train.loops.steps import LoopResult, Request, Signals, no_request
from train.model.gradients import GradientPolicy
from train.patches import exact_order, nan_gradients, optimizer_rate, summed_gradients
from train.pipeline import edges, schedule
from train.pipeline.stage import StageGraph
from train.telemetry.step_timer import Times


class PipelineSteps:
    """This task's part of a pipeline: one stage, or all stages if it trains alone."""

    def __init__(self, context: TaskContext, policy: GradientPolicy) -> None:
        exact_order.keep_order_of_operations()
        assert context.task_stages is not None
        self._context, self._policy, self._task_stages = context, policy, context.task_stages
        summed_gradients.take_summed_gradients(policy.optimizer)
        config, task_stages = context.config, context.task_stages
        self._asynchronous = config.pipeline.schedule == "pipedream"
        assert context.source.in_memory  # the plan refuses others
        shards = VirtualShards(task_stages.pipelines, task_stages.pipelines)
        self._feed = feeds.train_feed(context.strategy, context.source, config, cut=shards)
        self._programs = schedule.build_programs(config.pipeline.schedule, task_stages.stages, config.micro_batches)
        self._edges: edges.Edges = edges.LocalEdges() if task_stages.whole else edges.TaskEdges(task_stages.pipeline)
        self._stages = {
            number: StageGraph(context, policy, number, self._edges, self._feed, self._update)
            for number in task_stages.held
        }
        self._loop = tf.function(self._trace_loop, autograph=False)
        self._total = steps.summing(context.gang)

    def run(self, first: int, count: int, request: Request = no_request) -> LoopResult:
        signals_4 = tf.constant(request(count, count).to_array())
        began = time.perf_counter()
        results_S2 = self._loop(tf.constant(first, tf.int64), tf.constant(count, tf.int64))
        flat = self._total(tf.concat([tf.reshape(results_S2, [-1]), signals_4], 0)).numpy()
        self._context.positions.set(Place.EXCHANGE, first + count, left=True)
        times = Times(np.full(count, (time.perf_counter() - began) / count))
        results_S2 = flat[:-4].reshape(-1, 2)[:count]
        return LoopResult.of_columns(results_S2, self._context.objective, Signals.from_sum(flat[-4:]), times)

    def evaluation(self) -> Callable[[], dict[str, float]]:
        context, pipelines = self._context, self._task_stages.pipelines
        if self._task_stages.whole:
            return context.new_evaluation()
        examples = context.source.examples("test")
        batch = min(context.config.evaluation_batch, context.source.test_examples)
        assert examples is not None
        share = {"replica_batch": batch, "num_replicas": pipelines}
        rounds = eval_batches(context.source.test_examples, **share)
        ((number, stage),) = self._stages.items()
        stage_model = self._task_stages.models[number]
        (inputs,) = stage_model.model.inputs
        received = tf.TensorSpec([batch, *inputs.shape[1:]], inputs.dtype)

        def add(at: tf.Tensor, totals_N2M: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([totals_N2M]):
                at = tf.identity(at)
            context.positions.set_batch(at, after=totals_N2M)
            examples_B = feeds.eval_batch(examples, at, tf.constant(self._task_stages.pipeline, tf.int64), **share)
            if number == 0:
                values = train_step.cast_features(context.model, examples_B.features)
            else:
                values = self._edges.receive(received, edges.EVALUATED, number, 0)
            place = at * pipelines + self._task_stages.pipeline
            outputs = stage.predict(values, place)
            if number < self._task_stages.stages - 1:
                with tf.control_dependencies(self._edges.send(outputs, edges.EVALUATED, number, 0)):
                    return tf.identity(totals_N2M)
            outputs = train_step.cast_outputs(outputs)
            return evaluation.add_totals(totals_N2M, place, context.objective, examples_B, outputs)

        @tf.function(autograph=False)
        def evaluate_all() -> tf.Tensor:
            start = tf.zeros([rounds * pipelines, 2, len(context.objective.reported)])
            return train_step.repeat(tf.constant(rounds, tf.int64), add, start, parallel=1)

        def measure() -> dict[str, float]:
            totals_N2M = self._total(evaluate_all()).numpy()
            penalty = float(self._total(tf.constant(stage_model.penalty(), tf.float32))) / pipelines
            return evaluation.summarize(totals_N2M, context.objective, penalty)

        return measure

    def _trace_loop(self, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        def step(done: tf.Tensor, results_S2: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([results_S2]):  # a step begins once the previous one has ended
                at = tf.identity(first + done)
            self._context.positions.set(Place.EXCHANGE, at + 1)
            return tf.tensor_scatter_nd_update(results_S2, [[done]], [self._step(at)])

        return train_step.repeat(count, step, tf.zeros([self._context.config.steps_per_loop, 2]))

    def _step(self, step: tf.Tensor) -> tf.Tensor:
        """Do a step; return this task's share of the loss and of the score, `[2] float32`."""
        for stage in self._stages.values():
            stage.begin(step)
        with tf.control_dependencies([step]):
            self._steps_before = tf.identity(self._policy.optimizer.iterations.value)
            self._rate = tf.convert_to_tensor(self._policy.optimizer.learning_rate)
        order = [item for item in schedule.interleave(self._programs) if item[0] in self._stages]
        updates = [item for item in order if item[1].opcode is schedule.Opcode.UPDATE]
        for number, instruction in order:
            if self._asynchronous or instruction.opcode is not schedule.Opcode.UPDATE:
                self._stages[number].execute(instruction)
        if not self._asynchronous:
            self._agree()
            for number, instruction in updates:
                self._stages[number].execute(instruction)
        results = [stage.end() for stage in self._stages.values()]
        if self._finite is not None and self._policy.loss_scale:
            with tf.control_dependencies(results):
                self._policy.loss_scale.update(self._finite)
        share = self._context.config.micro_batches if self._asynchronous else 1
        return self._policy.checked(functools.reduce(operator.add, results), []) / share

    _norm: tf.Tensor | None = None
    _finite: tf.Tensor | None = None

    def _agree(self) -> None:
        """Add up gradients over pipelines and sharing stages; compute their norm and whether all are finite."""
        task_stages, policy = self._task_stages, self._policy
        dtypes = {variable.dtype for variable in self._context.model.trainable_variables}
        self._summed: dict[int, dict[int, tf.Tensor]] = {}
        for number, stage in self._stages.items():
            gradients = policy.converted(stage.sums, dtypes)
            if task_stages.pipelines > 1:
                group = task_stages.pipelines, edges.SUM_KEYS + number
                gradients = [edges.add_up(gradient, *group, at) for at, gradient in enumerate(gradients)]
            self._summed[number] = self._by_variable(number, gradients)
        for index, (variable, users) in enumerate(task_stages.shared):
            held = [self._summed[number] for number in users if number in self._stages]
            if held and task_stages.whole:
                total = functools.reduce(operator.add, [sums[id(variable)] for sums in held])
            elif held:
                key = edges.SHARED_KEYS + edges.MOST_SHARED * task_stages.pipeline + index
                total = edges.add_up(held[0][id(variable)], len(users), key)
            for sums in held:
                sums[id(variable)] = total
        if policy.loss_scale is not None:
            finite = tf.stack([policy.finite([*sums.values()]) for sums in self._summed.values()])
            self._finite = self._over_stages(tf.math.count_nonzero(~finite, dtype=tf.float32), edges.FLAG) == 0
            for sums in self._summed.values():
                sums |= dict(zip(sums, policy.unscaled([*sums.values()]), strict=True))
        if policy.clip_norm:
            self._norm = self._global_norm()

    def _by_variable(self, number: int, gradients: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        return dict(zip(map(id, self._task_stages.models[number].trained), gradients, strict=True))

    def _update(self, number: int, sums: Sequence[tf.Tensor], at: int) -> tf.Tensor:
        """Apply a stage's gradients; return 0, or NaN if training must end.

        Between steps the optimizer counts steps, as learning-rate schedules expect. Within a PipeDream step it counts
        updates, which Adam's bias correction needs.
        """
        policy, stages = self._policy, self._task_stages
        # Within one task the first stage that uses a variable updates it for all.
        variables = stages.list_first_used(number) if stages.whole else stages.models[number].trained
        summed = self._by_variable(number, sums) if self._asynchronous else self._summed[number]
        gradients = [summed[id(variable)] for variable in variables]
        # Stages of one process share the optimizer, which counts the updates of all of them.
        iterations, before = policy.optimizer.iterations, self._steps_before
        micro_batches = self._context.config.micro_batches
        iterations.assign(before * micro_batches + at if self._asynchronous else before)
        if gradients:
            with optimizer_rate.fixed_rate(policy.optimizer, self._rate):
                policy.update(gradients, variables, self._finite, self._norm)
        counts = at == micro_batches - 1 if self._finite is None else self._finite
        iterations.assign(before + tf.cast(counts, before.dtype))
        # All stages take part in computing the norm, even a stage without gradients, which does not use it.
        norm = [] if self._norm is None else [self._norm]
        with tf.control_dependencies([iterations.value.read_value(), *norm]):
            return tf.zeros([]) if policy.loss_scale else nan_gradients.nan_if_broken(tf.zeros([]), gradients)

    def _global_norm(self) -> tf.Tensor:
        """Return the norm of all stages' gradients, with the bits of `tf.linalg.global_norm` on one device."""
        halves = {key: tf.nn.l2_loss(sums[key]) for sums in self._summed.values() for key in sums}
        # The first user of a variable adds its half, the others add zeros, so that the sum over stages is exact.
        counted = {id(variable) for number in self._stages for variable in self._task_stages.list_first_used(number)}
        weights = self._context.model.trainable_variables
        local = tf.stack([halves[id(weight)] if id(weight) in counted else tf.zeros([]) for weight in weights])
        return tf.sqrt(tf.reduce_sum(self._over_stages(local, edges.NORM)) * 2.0)

    def _over_stages(self, tensor: tf.Tensor, kind: int) -> tf.Tensor:
        """Add up a tensor of this task's stages over all stages of the pipeline; `kind` is `edges.NORM` or `FLAG`."""
        stages = self._task_stages
        return tensor if stages.whole else edges.add_up(tensor, stages.stages, edges.STAGE_KEYS + stages.pipeline, kind)
