"""`--bitwise-elastic V`: the same weights, bit for bit, on any number of replicas up to V.

The global batch is always cut into V virtual shards (`virtual_shards.py`). A shard is computed whole by one
replica, by the same operations on the same shapes, so that what it gives has the same bits wherever that is. What the
shards give is then added up exactly (`exact_sum.py`), so that no order of the sums shows in the result.

To the model a shard is what a replica is otherwise: random layers draw by it, it has micro-batches, and
BatchNormalization normalises over each of them; layers' state follows `train/model/layer_state.py`.

Source: the virtual workers of EasyScale (Li et al., arXiv:2208.14228), which is for PyTorch.

Shapes: n shards of this replica, V shards of all replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from train.data.batches import Batch
from train.elastic.exact_sum import exact_sum
from train.elastic.virtual_shards import VirtualShards
from train.loops.train_step import Computed, TrainStep, repeat
from train.model import exchange, masks
from train.patches import nan_gradients, placed_seeds


class ComputedShards(NamedTuple):
    """What a replica has computed of its shards before it exchanges anything."""

    numbers_n: tf.Tensor
    """Of its shards, int64."""
    gradients: list[tf.Tensor]
    """Of each trainable variable `[n, ...] float32`."""
    state: list[tf.Tensor]
    """What each contributes to the state of layers, `[n, ...]`."""
    results_n2: tf.Tensor
    """Each shard's share of the loss and of the score."""


@dataclass(frozen=True)
class ElasticTrainStep(TrainStep):
    """A training step on virtual shards; `num_replicas` is their number.

    A replica holds the gradients of all of its shards in memory: the grid of their sum follows from the largest.
    """

    shards: VirtualShards = field(kw_only=True)

    @property
    def parts(self) -> int:
        """Every shard has its share of the loss."""
        return self.shards.total

    @property
    def accumulates(self) -> bool:
        """A shard accumulates its micro-batches by itself: it exchanges nothing with others."""
        return False

    def compute(  # type: ignore[override]
        self, batch_of: Callable[[tf.Tensor], Batch], step: tf.Tensor, replica: tf.Tensor, _micro_batch: Any = None
    ) -> ComputedShards:
        """Compute the gradients of this replica's shards, one after the other; arguments as for `TrainStep`."""
        weights = [tf.convert_to_tensor(variable.value) for variable in self.model.trainable_variables]

        def one(shard: tf.Tensor) -> Any:
            part = self._shard(batch_of, step, shard, weights)
            loss = part.loss
            if self.policy.loss_scale is None:
                loss = nan_gradients.nan_if_broken(loss, part.gradients)
            return part.gradients, part.state, tf.stack([loss, part.score])

        numbers_n = self.shards.of(replica)
        counts_O = self._counts(batch_of, numbers_n) if self.masked else None
        like = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in weights]
        signature = (like, self.state.specs, tf.TensorSpec([2], tf.float32))
        with contextlib.nullcontext() if counts_O is None else masks.of_batch(counts_O, self.global_batch):
            gradients, state, results_n2 = tf.map_fn(
                one, numbers_n, fn_output_signature=signature, parallel_iterations=1
            )
        return ComputedShards(numbers_n, gradients, state, results_n2)

    def update(self, computed: ComputedShards) -> tf.Tensor:  # type: ignore[override]
        """Change the weights by the exact sum over all shards; return what each gave, `[V, 2]`."""
        total = exact_sum(computed.gradients, self.shards.total)
        self.state.assign(computed.state, self._add_up)
        self.policy.apply([tf.cast(of, tf.float32) for of in total], self.model.trainable_variables)
        losses_n = self.policy.checked(computed.results_n2[:, 0], [])
        results_n2 = tf.stack([losses_n, computed.results_n2[:, 1]], 1)
        return tf.tensor_scatter_nd_update(tf.zeros([self.parts, 2]), computed.numbers_n[:, tf.newaxis], results_n2)

    def _counts(self, batch_of: Callable[[tf.Tensor], Batch], numbers_n: tf.Tensor) -> tf.Tensor:
        """Return how many positions of each output count in all shards."""

        def of_shard(shard: tf.Tensor) -> tf.Tensor:
            def add(micro_batch: tf.Tensor, total_O: tf.Tensor) -> tf.Tensor:
                return total_O + self.count(batch_of(shard * self.micro_batches + micro_batch))

            return repeat(tf.constant(self.micro_batches, tf.int64), add, self.zero_counts(), parallel=1)

        signature = tf.TensorSpec(self.zero_counts().shape, tf.int64)
        counts_nO = tf.map_fn(of_shard, numbers_n, fn_output_signature=signature, parallel_iterations=1)
        return masks.over_replicas(tf.reduce_sum(counts_nO, 0))

    def _shard(
        self,
        batch_of: Callable[[tf.Tensor], Batch],
        step: tf.Tensor,
        shard: tf.Tensor,
        weights: list[tf.Tensor],
    ) -> Computed:
        """Return what a shard gives."""

        def one(micro_batch: tf.Tensor | None) -> Computed:
            batch = batch_of(shard if micro_batch is None else shard * self.micro_batches + micro_batch)
            place = placed_seeds.random_place(step, shard, micro_batch)
            part = self.state.part(self.model.trainable_variables, weights)
            with place, tf.GradientTape(watch_accessed_variables=False) as tape, part as state:
                tape.watch(weights)
                loss, score = self.shares(batch)
            unconnected = tf.UnconnectedGradients.ZERO
            scale = self.policy.loss_gradient
            gradients = tape.gradient(loss, weights, output_gradients=scale, unconnected_gradients=unconnected)
            return Computed([tf.convert_to_tensor(gradient) for gradient in gradients], loss, score, state())

        def add(micro_batch: tf.Tensor, total: Computed) -> Computed:
            return self.add(total, one(micro_batch))

        if self.micro_batches == 1:
            return one(None)
        done: Computed = repeat(tf.constant(self.micro_batches, tf.int64), add, self.zeros(), parallel=1)
        return done

    def _add_up(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums over all shards: exact, as whole numbers are."""
        if parts[0].dtype.is_floating:
            return exact_sum([tf.cast(part, tf.float32) for part in parts], self.shards.total)
        return exchange.add_up([tf.reduce_sum(part, 0) for part in parts])
