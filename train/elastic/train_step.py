"""`--bitwise-elastic V`: the same weights, bit for bit, on any number of replicas up to V.

The global batch is always cut into V virtual shards (`virtual_shards.py`). A shard is computed whole by one
replica, by the same operations on the same shapes, so that what it gives has the same bits wherever that is. What the
shards give is then added up exactly (`exact_sum.py`), so that no order of the sums shows in the result.

To the model a shard is what a replica is otherwise: random layers draw by it, and BatchNormalization normalises over
it; how the shards change its moving averages is averaged.

Source: the virtual workers of EasyScale (Li et al., arXiv:2208.14228), which is for PyTorch.

Shapes: n shards of this replica, V shards of all replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from train.data.sources import Feed
from train.elastic.exact_sum import exact_sum
from train.elastic.virtual_shards import VirtualShards
from train.loops.steps import Trainee
from train.model import gradients as descent
from train.model import keras_compat
from train.telemetry.stopwatch import Lap


@dataclass(frozen=True)
class ElasticTrainee(Trainee):
    """What is trained on virtual shards; `num_replicas` is their number.

    A replica holds the gradients of all of its shards in memory: the grid of their sum follows from the largest.
    """

    shards: VirtualShards

    def __post_init__(self) -> None:
        keras_compat.take_summed_gradients(self.optimizer)
        if governed := descent.of(self.optimizer):
            governed.sums_up = False
        for variable in self._averaged:
            if hasattr(variable.value, "_aggregation"):  # CentralStorageStrategy would have all replicas write it
                variable.value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA

    @property
    def parts(self) -> int:
        """Every shard tells its share of the loss."""
        return self.shards.total

    @property
    def _averaged(self) -> list[keras.Variable]:
        """The variables that the shards change each in its own way: only what is counted in fractions can differ."""
        return [variable for variable in self.model.non_trainable_variables if variable.dtype == "float32"]

    def advance(self, feed: Feed, given: Any, step: tf.Tensor, replica: tf.Tensor, lap: Lap) -> tf.Tensor:
        """Do this replica's part of one optimizer step: all of its shards; return what each gave, `[V, 2]`."""
        model, averaged = self.model, self._averaged
        weights, before = (_values(variables) for variables in (model.trainable_variables, averaged))
        scale = descent.seed(self.optimizer)

        def one(shard: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
            lap.asks(shard)
            batch = feed.batch(given, step, shard)
            lap.has_batch(batch)
            state = zip([*model.trainable_variables, *averaged], [*weights, *before], strict=True)
            scope = keras.StatelessScope(state, collect_losses=True)
            with keras_compat.random_place(step, shard), tf.GradientTape(watch_accessed_variables=False) as tape, scope:
                tape.watch(weights)
                loss, score = self.shares(batch)
            unconnected = tf.UnconnectedGradients.ZERO
            gradients = tape.gradient(loss, weights, output_gradients=scale, unconnected_gradients=unconnected)
            changes = [scope.get_current_value(variable) - old for variable, old in zip(averaged, before, strict=True)]
            told_2 = tf.stack([loss if scale is not None else keras_compat.told_of_broken(loss, gradients), score])
            return [tf.convert_to_tensor(gradient) for gradient in gradients], changes, told_2

        lap.has_batch(given)
        with tf.control_dependencies(tf.nest.flatten(given, expand_composites=True)):
            numbers_n = tf.identity(self.shards.of(replica))  # what is waited for here no shard waits for again
        like = [[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (weights, before)]
        signature = (*like, tf.TensorSpec([2], tf.float32))
        gradients, changes, results_n2 = tf.map_fn(one, numbers_n, fn_output_signature=signature, parallel_iterations=1)
        lap.has_gradients(gradients)
        sums = exact_sum([*gradients, *changes], self.shards.total)
        summed, changed = sums[: len(weights)], sums[len(weights) :]
        self.optimizer.apply([tf.cast(total, tf.float32) for total in summed], model.trainable_variables)
        for variable, old, total in zip(averaged, before, changed, strict=True):
            variable.value.assign(old + tf.cast(total / self.shards.total, tf.float32))
        if scale is not None:
            losses_n = descent.told(self.optimizer, results_n2[:, 0], [])
            results_n2 = tf.stack([losses_n, results_n2[:, 1]], 1)
        return tf.tensor_scatter_nd_update(tf.zeros([self.parts, 2]), numbers_n[:, tf.newaxis], results_n2)


def _values(variables: list[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable.value) for variable in variables]
