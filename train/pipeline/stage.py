"""One stage of a pipeline: executes the instructions of its schedule as operations of a graph.

Control dependencies keep the operations of a stage in the order of its instructions. Sends run concurrently. A receive
may begin while the computation before it runs, but not earlier: otherwise all receive buffers of a step would be
allocated at once, and the memory bound of 1F1B would be lost.

Forward, backward and the addition of gradients are separate functions that are never inlined. They are traced once for
any number of micro-batches, and optimized alike in all calls, so that their bits are those of one device.

Shapes: B micro-batch.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from train.context import TaskContext
from train.data.batches import Batch
from train.data.feeds import Feed
from train.loops.train_step import cast_features, cast_outputs, never_inlined, sum_layer_losses
from train.model.gradients import GradientPolicy
from train.model.layer_state import LayerState
from train.model.objectives import global_mean
from train.patches import placed_seeds
from train.pipeline.edges import GRADIENTS, VALUES, Edges
from train.pipeline.schedule import Instruction, Opcode

Update = Callable[[int, Sequence[tf.Tensor], int], tf.Tensor]
"""Applies the gradients of a stage's variables after a micro-batch; returns 0, or NaN if training must end."""


class StageGraph:
    """One stage's part of one step, while its graph is traced."""

    def __init__(
        self, context: TaskContext, policy: GradientPolicy, number: int, edges: Edges, feed: Feed, update: Update
    ) -> None:
        """Prepare stage `number` (from 0): the first takes features of the micro-batches in `feed`, the last labels."""
        config, task_stages = context.config, context.task_stages
        assert task_stages is not None
        stage_model, replica = task_stages.models[number], task_stages.pipeline
        # In PipeDream each micro-batch has a separate update; otherwise gradients are added up from zeros,
        # as on one device, and each micro-batch adds its share of the losses of layers, such as regularization.
        separate, parts = config.pipeline.schedule == "pipedream", task_stages.pipelines * config.micro_batches
        shares, micro_batch = 1 if separate else parts, config.global_batch // parts
        self._loss_batch = micro_batch if separate else config.global_batch
        """Number of examples over which the loss is a mean; in PipeDream a micro-batch has a separate update."""
        model = stage_model.model
        self._context, self._policy, self._number, self._edges = context, policy, number, edges
        self._feed, self._first_part, self._update = feed, task_stages.pipeline * config.micro_batches, update
        self._remat, self._device = config.pipeline.remat, task_stages.device(number)
        self._accumulates = config.micro_batches > 1 and not separate
        self._first, self._last = number == 0, number == task_stages.stages - 1
        self._stage_model = stage_model
        self._inputs = tf.TensorSpec([micro_batch, *model.inputs[0].shape[1:]], model.inputs[0].dtype)
        self._outputs = tf.TensorSpec([micro_batch, *model.outputs[0].shape[1:]], model.outputs[0].dtype)

        self._state = LayerState(model, shares)

        def forward(values: tf.Tensor, step: tf.Tensor, at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None, list[Any]]:
            place = placed_seeds.random_place(step, tf.constant(replica, tf.int64), at, stage_model.drawn)
            with place, self._state.isolate() as state:
                outputs = model(values, training=True)
                outputs = self._loss(outputs, step, at) if self._last else outputs
                terms = stage_model.losses()
            layer_losses = sum_layer_losses(terms) / shares if terms else None
            return outputs, layer_losses, state()

        self._forward = never_inlined(forward)

        def predict(values: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
            with placed_seeds.random_place(tf.zeros_like(batch), batch, drawn=stage_model.drawn):
                return model(values, training=False)

        self.predict = predict if self._last else never_inlined(predict)  # a function would lose the last's logits
        """(inputs of the stage, number of the batch) -> its outputs, for batches of any size."""

    def _batch(self, step: tf.Tensor, at: tf.Tensor) -> Batch:
        return self._feed.batch((), step, at + self._first_part)

    def _loss(self, outputs: tf.Tensor, step: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
        """Return a micro-batch's share of the loss, and of the score, `[2] float32`."""
        objective, batch = self._context.objective, self._batch(step, at)
        outputs = cast_outputs(outputs)
        loss = global_mean(objective.loss(batch.labels, outputs), batch.weights, self._loss_batch)
        score = global_mean(objective.score(batch.labels, outputs), tf.ones_like(batch.weights), self._loss_batch)
        return tf.stack([loss, tf.stop_gradient(score)])

    def begin(self, step: tf.Tensor) -> None:
        self._step = step
        self._kept: dict[int, tuple[Any, ...]] = {}
        self._sums: list[tf.Tensor] | None = None
        self._states: list[tf.Tensor] = []
        self._results: list[tf.Tensor] = []
        self._flags: list[tf.Tensor] = []
        self._chain: list[tf.Tensor | tf.Operation] = [step, step]
        self._sent: list[tf.Operation] = []

    @property
    def sums(self) -> list[tf.Tensor]:
        """The gradients of the stage's variables, added up since the last update."""
        assert self._sums is not None
        return self._sums

    def end(self) -> tf.Tensor:
        """Return the results of the step, `[2] float32`: loss and score on the last stage, zeros on others."""
        with tf.control_dependencies([*self._sent, self._chain[-1]]):
            result = functools.reduce(operator.add, self._results, tf.zeros([2]))
            return result + tf.stack([functools.reduce(operator.add, self._flags, tf.zeros([])), 0.0])

    def execute(self, instruction: Instruction) -> None:
        do = {Opcode.FORWARD: self._do_forward, Opcode.BACKWARD: self._do_backward, Opcode.UPDATE: self._do_update}
        with tf.device(self._device):
            do[instruction.opcode](instruction.micro_batch)

    def _do_forward(self, at: int) -> None:
        micro_batch = tf.constant(at, tf.int64)
        with tf.control_dependencies([self._chain[-2]]):
            if self._first:
                values = cast_features(self._context.model, self._batch(self._step, micro_batch).features)
            else:
                values = self._edges.receive(self._inputs, VALUES, self._number, at)
        with tf.control_dependencies([self._chain[-1]]):
            if self._remat:
                outputs, layer_losses, state = self._forward(values, self._step, micro_batch)
                self._kept[at] = (values, micro_batch)
            else:
                tape, outputs, layer_losses, state = self._taped(values, micro_batch)
                self._kept[at] = (tape, outputs, layer_losses, values)
        self._states = add(self._states, state) if self._states else state
        self._chain.append(outputs)
        if self._last:
            self._results.append(outputs)
        if layer_losses is not None:
            self._results.append(tf.stack([layer_losses, 0.0]))
        if not self._last:
            self._sent += self._edges.send(outputs, VALUES, self._number, at)

    def _taped(self, values: tf.Tensor, micro_batch: tf.Tensor) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            if not self._first:
                tape.watch(values)
            outputs, layer_losses, state = self._forward(values, self._step, micro_batch)
        return tape, outputs, layer_losses, state

    def _do_backward(self, at: int) -> None:
        with tf.control_dependencies([self._chain[-2]]):
            received = None if self._last else self._edges.receive(self._outputs, GRADIENTS, self._number, at)
        with tf.control_dependencies([self._chain[-1]]):
            if self._remat:
                values, micro_batch = self._kept.pop(at)
                tape, outputs, layer_losses, _ = self._taped(values, micro_batch)
            else:
                tape, outputs, layer_losses, values = self._kept.pop(at)
            scale = tf.ones([]) if (loss_scale := self._policy.loss_gradient) is None else loss_scale
            # Only the loss of [loss, score] is minimized.
            seed = tf.stack([scale, 0.0]) if received is None else received
            targets, seeds = ([outputs], [seed]) if layer_losses is None else ([outputs, layer_losses], [seed, scale])
            variables = [variable.value for variable in self._stage_model.trained]  # callbacks may have frozen some
            sources = variables if self._first else [values, *variables]
            gradients = tape.gradient(
                targets, sources, output_gradients=seeds, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            sent = seed if self._first else gradients.pop(0)
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            if self._accumulates:
                zeros = [tf.zeros(variable.shape) for variable in variables]
                dense = add(zeros if self._sums is None else self._sums, dense)
            self._sums = dense
            # A stage with frozen weights has only the gradient that it sends, or the one that it received.
            done = tf.identity(next(iter(dense), sent))
        self._chain.append(done)
        if not self._first:
            self._sent += self._edges.send(sent, GRADIENTS, self._number, at)

    def _do_update(self, at: int) -> None:
        with tf.control_dependencies([self._chain[-1]]):
            self._state.assign(self._states, list)  # one replica: nothing to add up
            self._flags.append(self._update(self._number, self.sums, at))
        self._sums = None
        self._chain.append(self._flags[-1])


@never_inlined
def add(sums: list[tf.Tensor], gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Add gradients to sums, in the type of these, two at a time, so that no graph rewrite changes the order."""
    return [total + tf.cast(gradient, total.dtype) for total, gradient in zip(sums, gradients, strict=True)]
