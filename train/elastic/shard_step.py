"""`--bitwise-elastic V`: the same weights, bit for bit, on any number of replicas up to V.

The global batch is always cut into V virtual shards, `VirtualShards`. One replica computes a whole shard, with the same
operations on the same shapes, so that the bits of its results are the same on any replica. The results are then added
up exactly (`exact_sum.py`), independent of the order.

To the model, a shard is a replica: random layers draw by shard, and BatchNormalization normalizes over each of a
shard's micro-batches; layers' state follows `train/model/layer_state.py`.

Source: the virtual workers of EasyScale for PyTorch (Li et al., arXiv:2208.14228).

Shapes: n shards of this replica, V shards of all replicas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from train.data.batches import Batch, VirtualShards
from train.elastic.exact_sum import exact_sum
from train.loops.train_step import Computed, TrainStep, repeat
from train.model import masks
from train.model.gradients import sum_over_replicas
from train.patches import nan_gradients, placed_seeds


class ComputedShards(NamedTuple):
    """Results of a replica's shards before any exchange with other replicas."""

    numbers_n: tf.Tensor
    """Numbers of this replica's shards, int64."""
    gradients: list[tf.Tensor]
    """Gradient of each trainable variable, `[n, ...] float32`."""
    state: list[tf.Tensor]
    """Contributions to the state of layers, `[n, ...]`."""
    results_n2: tf.Tensor
    """Each shard's share of the loss and of the score."""


@dataclass(frozen=True)
class ElasticTrainStep(TrainStep):
    """A training step on virtual shards; `num_replicas` is their number.

    A replica holds the gradients of all of its shards in memory, as the largest determines the grid of their sum.
    """

    shards: VirtualShards = field(kw_only=True)

    @property
    def parts(self) -> int:
        """One share of the loss per shard."""
        return self.shards.total

    @property
    def accumulates(self) -> bool:
        """False: a shard accumulates its micro-batches itself, without exchanging anything."""
        return False

    def compute(  # type: ignore[override]
        self, batch_of: Callable[[tf.Tensor], Batch], step: tf.Tensor, replica: tf.Tensor, _micro_batch: Any = None
    ) -> ComputedShards:
        """Compute the gradients of this replica's shards sequentially; the arguments are those of `TrainStep`."""
        weights = [tf.convert_to_tensor(variable.value) for variable in self.model.trainable_variables]

        def compute_shard(shard: tf.Tensor) -> Any:
            part = self._shard(batch_of, step, shard, weights)
            loss = part.loss
            if self.policy.loss_scale is None:
                loss = nan_gradients.nan_if_broken(loss, part.gradients)
            return part.gradients, part.state, tf.stack([loss, part.score])

        numbers_n = self.shards.list_shards(replica)
        counts_O = self._counts(batch_of, numbers_n) if self.masked else None
        like = [tf.TensorSpec(tensor.shape, tf.float32) for tensor in weights]
        signature = (like, self.state.specs, tf.TensorSpec([2], tf.float32))
        with masks.of_batch(counts_O, self.global_batch):
            gradients, state, results_n2 = tf.map_fn(
                compute_shard, numbers_n, fn_output_signature=signature, parallel_iterations=1
            )
        return ComputedShards(numbers_n, gradients, state, results_n2)

    def update(self, computed: ComputedShards) -> tf.Tensor:  # type: ignore[override]
        """Apply the exact sum over all shards; return the results of each shard, `[V, 2]`."""
        total = exact_sum(computed.gradients, self.shards.total)
        self.state.assign(computed.state, self._add_up)
        gradients = self.without_unconnected([tf.cast(gradient, tf.float32) for gradient in total])
        self.policy.apply(gradients, self.model.trainable_variables)
        results_n2 = tf.stack([self.policy.checked(computed.results_n2[:, 0], []), computed.results_n2[:, 1]], 1)
        return tf.tensor_scatter_nd_update(tf.zeros([self.parts, 2]), computed.numbers_n[:, tf.newaxis], results_n2)

    def _counts(self, batch_of: Callable[[tf.Tensor], Batch], numbers_n: tf.Tensor) -> tf.Tensor:
        def count_shard(shard: tf.Tensor) -> tf.Tensor:
            def add(micro_batch: tf.Tensor, total_O: tf.Tensor) -> tf.Tensor:
                return total_O + self.count(batch_of(shard * self.micro_batches + micro_batch))

            return repeat(tf.constant(self.micro_batches, tf.int64), add, self.zero_counts(), parallel=1)

        signature = tf.TensorSpec(self.zero_counts().shape, tf.int64)
        counts_nO = tf.map_fn(count_shard, numbers_n, fn_output_signature=signature, parallel_iterations=1)
        return masks.sum_counts(tf.reduce_sum(counts_nO, 0))

    def _shard(
        self, batch_of: Callable[[tf.Tensor], Batch], step: tf.Tensor, shard: tf.Tensor, weights: list[tf.Tensor]
    ) -> Computed:
        def compute_part(micro_batch: tf.Tensor | None) -> Computed:
            batch = batch_of(shard if micro_batch is None else shard * self.micro_batches + micro_batch)
            place = placed_seeds.random_place(step, shard, micro_batch)
            part = self.state.isolate(self.model.trainable_variables, weights)
            with place, tf.GradientTape(watch_accessed_variables=False) as tape, part as state:
                tape.watch(weights)
                loss, score = self.shares(batch)
            gradients = self.connected(tape.gradient(loss, weights, output_gradients=self.policy.loss_gradient))
            dense = [
                tf.zeros(weight.shape) if gradient is None else tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                for weight, gradient in zip(weights, gradients, strict=True)
            ]
            return Computed(dense, loss, score, state())

        def add(micro_batch: tf.Tensor, total: Computed) -> Computed:
            return self.add(total, compute_part(micro_batch))

        if self.micro_batches == 1:
            return compute_part(None)
        done: Computed = repeat(tf.constant(self.micro_batches, tf.int64), add, self.zeros(), parallel=1)
        return done

    def _add_up(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if parts[0].dtype.is_floating:
            return exact_sum([tf.cast(part, tf.float32) for part in parts], self.shards.total)
        return sum_over_replicas([tf.reduce_sum(part, 0) for part in parts])
