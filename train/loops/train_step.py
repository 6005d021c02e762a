"""One optimizer step of a replica, and gradient accumulation.

A replica's batch is cut into M micro-batches, 0 to M - 1. With M = 1 the gradient is used as it is. With more, the
gradients are added up in float32, one after the other, beginning from zeros: ((0 + g0) + g1) + ... + g(M-1), and so are
loss and score. A micro-batch starts only after the previous one was added, so memory holds the activations of one. The
loop is traced once for any M.

Parts of a step:
    per micro-batch      forward, loss, backward; BatchNormalization over its examples; different masks of Dropout
    per step             the sum over replicas, unscaling and the check that it is finite, clipping, the update; the
                         update of layers' state, such as moving averages (`train/model/layer_state.py`)

The loss of each example is divided by the size of the global batch, and that of each position by its number of unmasked
positions (`train/model/masks.py`). Losses of layers, such as regularization, which every micro-batch of every replica
adds, are divided by the number of both, so that they count once per step.

TensorFlow's Grappler may reorder sums; `train/patches/exact_order.py` prevents that.

Shapes: B micro-batch, K outputs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from train import named
from train.data.batches import Batch
from train.model import input_types, masks
from train.model.gradients import GradientPolicy, sum_over_replicas
from train.model.layer_state import LayerState
from train.model.objectives import Objective, global_mean
from train.named import Named
from train.patches import central_storage, placed_seeds, summed_gradients
from train.saving.trees import unwrap

Run = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
"""Calls a function on every replica with some arguments, such as `strategy.run`."""


class Computed(NamedTuple):
    """A replica's results of a step before any exchange with other replicas."""

    gradients: list[Any]
    """Gradient of its share of the loss for each trainable variable: a tensor, `tf.IndexedSlices` or None."""
    loss: tf.Tensor
    score: tf.Tensor
    state: list[tf.Tensor]
    """This replica's contributions to the state of layers, see `LayerState`."""


@dataclass(frozen=True)
class TrainStep:
    """Computes the gradients of a replica's batch and applies those of the global batch."""

    model: keras.Model
    policy: GradientPolicy
    objective: Objective
    global_batch: int
    num_replicas: int
    micro_batches: int = 1
    """Parts of a replica's batch, computed sequentially."""
    unrolled: bool = False
    """Whether the graph repeats the operations of each micro-batch instead of looping."""
    as_function: bool = False
    """Whether forward and backward are separate functions, for the bits of a pipeline stage: TensorFlow sums the
    gradients of a value with several uses in a different order in a function than on a tape. Costs processor time. Not
    for replicas that exchange values while they compute, such as averages of BatchNormalization."""

    def __post_init__(self) -> None:
        summed_gradients.take_summed_gradients(self.policy.optimizer)
        central_storage.let_replicas_assign([*self.model.variables, *self.policy.optimizer.variables])

    @functools.cached_property
    def state(self) -> LayerState:
        return LayerState(self.model, self.num_replicas * self.micro_batches)

    @functools.cached_property
    def _connected(self) -> set[int]:
        """Indices of the weights that have a gradient in a traced part; Keras neither updates nor decays the others."""
        return set()

    @property
    def parts(self) -> int:
        """Number of shares of each step's loss that `update` returns."""
        return 1

    @property
    def weights(self) -> list[tf.Variable]:
        """The trainable weights as TensorFlow variables, for either Keras."""
        return [unwrap(weight) for weight in self.model.trainable_variables]

    @property
    def accumulates(self) -> bool:
        """Whether to call `accumulated` instead of `compute`."""
        return self.micro_batches > 1

    def compute(
        self, batch_of: Callable[[tf.Tensor], Batch], step: tf.Tensor, replica: tf.Tensor, micro_batch: Any = None
    ) -> Computed:
        """Compute the gradients of this replica's batch or micro-batch, or count its positions (`masks.is_counting`).

        `batch_of` returns the examples of a part of the global batch. The numbers are int64 scalars: the optimizer
        steps done before this one, this replica's index, and that of the micro-batch, None if the batch is not cut.
        """
        batch = batch_of(replica if micro_batch is None else replica * self.micro_batches + micro_batch)
        if masks.is_counting():
            return self.count(batch)
        with tf.GradientTape() as tape:
            loss, score, state = self._forward(batch, step, replica, micro_batch)
        gradients = self.connected(tape.gradient(loss, self.weights, output_gradients=self.policy.loss_gradient))
        return Computed(gradients, loss, score, state)

    def compute_batch(self, batch: Batch, step: tf.Tensor, replica: tf.Tensor, micro_batch: Any = None) -> Computed:
        """Like `compute`, for a batch that this replica has already, of which a micro-batch is a part."""

        def batch_of(_part: tf.Tensor) -> Batch:
            return batch if micro_batch is None else cut_part(batch, micro_batch, self.micro_batches)

        return self.compute(batch_of, step, replica, micro_batch)

    def connected(self, gradients: list[Any]) -> list[Any]:
        """Record which weights have a gradient; return the gradients unchanged."""
        self._connected.update(place for place, gradient in enumerate(gradients) if gradient is not None)
        return gradients

    def without_unconnected(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, with None instead of zeros for weights that no part uses."""
        return [gradient if place in self._connected else None for place, gradient in enumerate(gradients)]

    def update(self, computed: Computed) -> tf.Tensor:
        """Apply the sum of all gradients; return shares `[parts, 2]` of loss, NaN to end training, and score."""
        gradients = computed.gradients
        if self.accumulates:  # a loop outside the replicas returns tensors without their device
            gradients = self.without_unconnected([tf.identity(gradient) for gradient in gradients])
        total = self.policy.sum(gradients)
        self.state.assign(computed.state, sum_over_replicas)
        self.policy.apply(total, self.model.trainable_variables)
        return tf.stack([self.policy.checked(computed.loss, gradients), computed.score])[tf.newaxis]

    @functools.cached_property
    def _forward(self) -> Callable[..., Any]:
        """The forward pass: (batch, step, replica, micro-batch) -> shares of loss, score and state."""

        def forward(batch: Batch, step: tf.Tensor, replica: tf.Tensor, micro_batch: Any) -> Any:
            with placed_seeds.random_place(step, replica, micro_batch), self.state.isolate() as state:
                return *self.shares(batch), state()

        return never_inlined(forward) if self.as_function and not self.masked else forward

    def shares(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Return a batch's shares of loss and score; those of all batches add up to what one device would compute."""
        outputs_BK = cast_outputs(self.model(cast_features(self.model, batch.features), training=True))
        with masks.average_over_batch(self._compared(outputs_BK)):
            losses_B = self.objective.loss(batch.labels, outputs_BK)
            scores_B = self.objective.score(batch.labels, outputs_BK)
        loss = global_mean(losses_B, batch.weights, self.global_batch)
        if self.model.losses:
            loss += sum_layer_losses(self.model.losses) / (self.num_replicas * self.micro_batches)
        return loss, global_mean(scores_B, tf.ones_like(batch.weights), self.global_batch)

    @functools.cached_property
    def masked(self) -> bool:
        """Whether a mask may reach an output, so that positions are counted before a part of a batch is averaged."""
        return masks.may_begin_in(self.model)

    def count(self, batch: Batch) -> tf.Tensor:
        """Return the number of unmasked positions of each output in a part of a batch, without changing state."""
        with keras.StatelessScope():
            return masks.count(self._compared(self.model(cast_features(self.model, batch.features), training=False)))

    def _compared(self, outputs_BK: Named) -> list[Any]:
        return [outputs_BK[head] for head in self.objective.heads] or [outputs_BK]

    def zero_counts(self) -> tf.Tensor:
        return tf.zeros([max(1, len(self.objective.heads))], tf.int64)

    def zeros(self) -> Computed:
        state = [tf.zeros(spec.shape, spec.dtype) for spec in self.state.specs]
        return Computed([tf.zeros(weight.shape) for weight in self.weights], tf.zeros([]), tf.zeros([]), state)

    def add(self, total: Computed, part: Computed) -> Computed:
        gradients = [
            old if new is None else old + tf.cast(new, tf.float32)
            for old, new in zip(total.gradients, part.gradients, strict=True)
        ]
        state = [old + new for old, new in zip(total.state, part.state, strict=True)]
        return Computed(gradients, total.loss + part.loss, total.score + part.score, state)

    def accumulated(self, compute: Callable[..., Computed], run: Run, args: Any) -> Any:
        """Return the sum over the micro-batches on every replica. Call in cross-replica context.

        Replicas cannot exchange values, such as averages of BatchNormalization, inside separate loops. So one loop
        calls `run`, such as `strategy.run`, which calls `compute` on every replica with its `args` and a micro-batch's
        number.
        """

        def count(total_O: tf.Tensor, micro_batch: tf.Tensor, *args: Any) -> Any:
            with masks.count_only():
                return total_O + compute(*args, micro_batch)

        def add(total: Computed, micro_batch: tf.Tensor, counts_O: Any, *args: Any) -> Computed:
            with masks.of_batch(counts_O, self.global_batch):
                return self.add(total, compute(*args, micro_batch))

        counts = None
        if self.masked:
            counts = self._over_micro_batches(run, count, run(self.zero_counts, ()), args)
            counts = run(masks.sum_counts, (counts,))
        return self._over_micro_batches(run, add, run(self.zeros, ()), (counts, *args))

    def _over_micro_batches(self, run: Run, function: Callable[..., Any], start: Any, args: tuple[Any, ...]) -> Any:
        def body(micro_batch: tf.Tensor, total: Any) -> Any:
            return run(function, (total, micro_batch, *args))

        if self.unrolled:
            for micro_batch in range(self.micro_batches):
                start = body(tf.constant(micro_batch, tf.int64), start)
            return start
        return repeat(tf.constant(self.micro_batches, tf.int64), body, start, parallel=1)


def sum_layer_losses(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of the losses that layers added; as in Keras, a term may have a value for each example."""
    # AddN's order depends on timing.
    return tf.reduce_sum(tf.stack([tf.reduce_sum(tf.cast(term, tf.float32)) for term in terms]))


def never_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `tf.function` that is optimized separately, as is its gradient, so that its bits are always the same."""
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


def cast_features(model: keras.Model, features: Named) -> Named:
    """Cast features to the types that a model takes; fail if it declares none and whole numbers would be rounded."""

    def cast(feature: tf.Tensor, dtype: str) -> tf.Tensor:
        if feature.dtype in (tf.int32, tf.int64) and dtype == "float32" and not getattr(model, "inputs", None):
            largest = tf.constant(input_types.EXACT[model.compute_dtype], feature.dtype)
            tf.debugging.assert_less_equal(tf.abs(feature), largest, f"{input_types.ROUNDED} {model.compute_dtype};")
        return tf.cast(feature, dtype)

    return named.each(cast, features, input_types.input_dtypes(model, features))


def cast_outputs(outputs_BK: Named) -> Named:
    """Cast a model's outputs to float32, in which losses are computed, with their masks."""

    def cast(output_BK: tf.Tensor) -> tf.Tensor:
        cast_BK = tf.cast(output_BK, tf.float32)
        if (mask := masks.mask_of(output_BK)) is not None:
            cast_BK._keras_mask = mask
        return cast_BK

    return tf.nest.map_structure(cast, outputs_BK)


def cut_part(batch: Batch, part: tf.Tensor, parts: int) -> Batch:
    """Return one of the equal parts of a batch."""
    return tf.nest.map_structure(
        lambda tensor: tf.reshape(tensor, [parts, tensor.shape[0] // parts, *tensor.shape[1:]])[part], batch
    )


def repeat(count: tf.Tensor, body: Callable[[tf.Tensor, Any], Any], state: Any, *, parallel: int = 10) -> Any:
    """Call `state = body(index, state)` for indices below `count`, an int64 scalar, and return the last state.

    At most `parallel` independent calls run at a time. Autograph would compile a `for` loop to the same graph, but
    takes longer to convert all called functions.
    """

    def step(done: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        return done + 1, body(done, state)

    start = (tf.zeros([], count.dtype), state)
    return tf.while_loop(lambda done, _: done < count, step, start, parallel_iterations=parallel)[1]
