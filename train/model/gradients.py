"""From gradients to an update: sum over replicas, unscale, clip, apply, or skip the step.

Keras clips each replica's gradients before the sum, and each replica checks only its own gradients for overflow. So its
clipping depends on the number of replicas, and its loss scaling can leave replicas with different weights.

Loss scaling: P. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.

Shapes: N numbers of all tensors together.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from train.patches import nan_gradients, summed_gradients
from train.saving.checkpoint import divergence_error

FIRST_SCALE, LARGEST_SCALE = 2.0**15, 2.0**24
GROWS_AFTER = 2000
"""Steps without an overflow after which the scale is doubled."""

LARGEST_SWAP = 2**26
"""Size in bytes up to which two tasks swap tensors: above it, transfer outweighs latency, and a ring transfers less."""

Gradients = Sequence[Any]
"""The gradient of each variable: a tensor, `tf.IndexedSlices` or None."""


class LossScale(tf.Module):
    """The factor of the loss that keeps small gradients from becoming zero in float16; always a power of two.

    It falls below 1 if gradients overflow even at 1; training cannot continue then.
    """

    def __init__(self) -> None:
        """Call inside the strategy's scope."""
        super().__init__(name="loss_scale")
        shared: dict[str, Any] = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
        self.scale = tf.Variable(FIRST_SCALE, dtype=tf.float32, **shared)
        self.good_steps = tf.Variable(0, dtype=tf.int64, **shared)
        self.skipped_steps = tf.Variable(0, dtype=tf.int64, **shared)

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": float(self.scale.numpy()), "skipped_steps": int(self.skipped_steps.numpy())}

    def update(self, finite: tf.Tensor) -> None:
        """Adapt the scale after a step; every replica calls it with the same value."""
        scale, good = tf.convert_to_tensor(self.scale), tf.convert_to_tensor(self.good_steps) + 1
        grows = good >= GROWS_AFTER
        grown = tf.where(grows, tf.minimum(2 * scale, LARGEST_SCALE), scale)
        zero = tf.zeros([], tf.int64)
        skipped = tf.convert_to_tensor(self.skipped_steps) + tf.cast(~finite, tf.int64)
        self.scale.assign(tf.where(finite, grown, scale / 2))
        self.good_steps.assign(tf.where(finite & ~grows, good, zero))
        self.skipped_steps.assign(skipped)


class GradientPolicy:
    """Turns the gradients of replicas into an update. Every replica calls the same methods in the same order.

    Attributes:
        optimizer: an optimizer of either Keras.
        clip_norm: largest norm of the gradient of the whole global batch; 0 for no bound.
        loss_scale: the loss scale of a training in float16, otherwise None.
    """

    def __init__(self, optimizer: Any, clip_norm: float = 0.0, loss_scale: LossScale | None = None) -> None:
        self.optimizer, self.clip_norm, self.loss_scale = optimizer, clip_norm, loss_scale
        self._update: Callable[[Any, Any], Any]
        if hasattr(optimizer, "aggregate_gradients"):  # of tf_keras
            apply_pairs = functools.partial(optimizer.apply_gradients, skip_gradients_aggregation=True)
            self._update = lambda gradients, variables: apply_pairs(zip(gradients, variables, strict=True))
        else:
            self._update = optimizer.apply

    @property
    def loss_gradient(self) -> tf.Tensor | None:
        """The initial gradient of the backward pass, which is the loss scale; None for 1."""
        return None if self.loss_scale is None else tf.convert_to_tensor(self.loss_scale.scale)

    def sum(self, gradients: Gradients) -> list[Any]:
        """Add up gradients over all replicas; None stays None."""
        known = [gradient for gradient in gradients if gradient is not None]
        sums = iter(sum_over_replicas(self.converted(known, {gradient.dtype for gradient in known})))
        return [None if gradient is None else next(sums) for gradient in gradients]

    def converted(self, gradients: Sequence[Any], dtypes: Collection[tf.DType]) -> Sequence[Any]:
        """Convert gradients to dense float32 tensors if the model's have several dtypes, are clipped or scaled."""
        if len(dtypes) == 1 and not self.clip_norm and not self.loss_scale:
            return gradients  # in other cases dense: slices can repeat a row, which changes their norm
        return [tf.cast(tf.convert_to_tensor(gradient), tf.float32) for gradient in gradients]

    def apply(self, total: Gradients, variables: Sequence[Any]) -> None:
        """Unscale and clip the gradient of the global batch, and apply it if it is finite."""
        pairs = [pair for pair in zip(total, variables, strict=True) if pair[0] is not None]
        gradients, known = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self.loss_scale is None:
            self.update(gradients, known)
            return
        finite = self.finite(gradients)
        self.update(self.unscaled(gradients), known, finite)
        self.loss_scale.update(finite)

    def finite(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Whether all gradients are finite, a bool scalar."""
        return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients)])

    def unscaled(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        assert self.loss_scale is not None
        factor = 1 / tf.convert_to_tensor(self.loss_scale.scale)
        return [gradient * factor for gradient in gradients]

    def update(
        self, gradients: list[Any], variables: Sequence[Any], finite: tf.Tensor | None = None, norm: Any = None
    ) -> None:
        """Clip and apply gradients, unless `finite` is false; `norm` is that of the whole model's gradients."""
        clipped = tf.clip_by_global_norm(gradients, self.clip_norm, norm)[0] if self.clip_norm else gradients
        if finite is None:
            self._update(clipped, variables)
        else:
            _call_if(finite, clipped, lambda gradients: self._update(gradients, variables))

    def checked(self, loss: tf.Tensor, gradients: Gradients) -> tf.Tensor:
        """Return the loss after its gradients were applied, or NaN if they require an end of the training."""
        if self.loss_scale is None:
            return nan_gradients.nan_if_broken(loss, gradients)
        return tf.where(tf.convert_to_tensor(self.loss_scale.scale) < 1, tf.constant(float("nan"), loss.dtype), loss)

    def install(self, variables: Sequence[Any]) -> None:
        """Patch the optimizer to sum, unscale and clip gradients, and to scale the loss, if these variables need that.

        This is for `Model.fit`, whose `train_step`, like a model's override, calls only these methods between the
        gradients and the update. Unpatched, a clipping optimizer clips each replica's gradients before the sum, and an
        optimizer cannot sum gradients of several dtypes.
        """
        optimizer = self.optimizer
        legacy = hasattr(optimizer, "aggregate_gradients")  # of tf_keras, which has no loss scale
        clips = any(getattr(optimizer, name, None) for name in ("clipnorm", "clipvalue", "global_clipnorm"))
        mixed = len({tf.as_dtype(variable.dtype) for variable in variables}) > 1
        if not self.clip_norm and self.loss_scale is None and not mixed and (legacy or not clips):
            return
        if legacy:

            def apply_gradients(pairs: Any, **_options: Any) -> tf.Variable:
                gradients, variables = zip(*pairs, strict=True)
                self.apply(self.sum(gradients), variables)
                return optimizer.iterations

            optimizer.apply_gradients = apply_gradients
            return
        summed_gradients.take_summed_gradients(optimizer)

        def apply(grads: Gradients, trainable_variables: Sequence[Any] | None = None) -> None:
            self.apply(self.sum(grads), trainable_variables or optimizer._trainable_variables)

        optimizer.apply = apply
        if self.loss_scale is not None:
            optimizer.scale_loss = lambda loss: loss * self.loss_gradient

    def check_scale(self, step: int) -> None:
        if self.loss_scale is not None and float(self.loss_scale.scale.numpy()) < 1:
            raise divergence_error(
                f"gradients overflow float16 at step {step} even at loss scale 1 (bf16 has float32's range)"
            )


def _call_if(finite: tf.Tensor, gradients: list[tf.Tensor], apply: Callable[[list[tf.Tensor]], object]) -> None:
    """Apply gradients under a condition that is the same on every replica."""

    def apply_here(gradients: Any) -> None:  # returns nothing, like the other branch
        apply(gradients)

    def together(strategy: tf.distribute.Strategy, finite: Any, gradients: Any) -> None:
        # Optimizers update all replicas at once, which a condition inside a single replica does not allow.
        tf.cond(
            strategy.experimental_local_results(finite)[0],
            lambda: strategy.extended.call_for_each_replica(apply_here, args=(gradients,)),
            lambda: None,
        )

    tf.distribute.get_replica_context().merge_call(together, args=(finite, gradients))


def sum_over_replicas(tensors: Sequence[Any]) -> list[Any]:
    """Add up tensors or `tf.IndexedSlices` over all replicas. Every replica calls it with the same shapes.

    Two tasks with one CPU replica each swap their tensors and add them. That takes one message each way; a ring of two
    takes two, the second after the first. In floating point a + b is b + a, so the bits are those of the ring. In all
    other cases the strategy reduces.
    """
    replica = tf.distribute.get_replica_context()
    if not tensors or replica.num_replicas_in_sync == 1:
        return list(tensors)
    gather = _gather_of_two(replica.strategy)
    if gather is None or not _can_be_one_message(tensors):
        # The results of a loop have no device, without which TensorFlow cannot reduce them.
        placed = [tensor if isinstance(tensor, tf.IndexedSlices) else tf.identity(tensor) for tensor in tensors]
        return replica.all_reduce("SUM", placed)
    local_N = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    both_2N = tf.ensure_shape(gather(local_N[tf.newaxis]), [2, *local_N.shape])
    parts = tf.split(both_2N[0] + both_2N[1], [tensor.shape.num_elements() for tensor in tensors])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _gather_of_two(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor] | None:
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or strategy.num_replicas_in_sync != 2:
        return None
    if len(devices := strategy.extended.worker_devices) != 1 or "CPU" not in devices[0]:
        return None
    # The public `all_gather` first exchanges the shapes, which takes another message.
    (launcher,) = strategy.extended._cross_device_ops._launchers
    return lambda local_1N: launcher._all_gather(local_1N, None)


def _can_be_one_message(tensors: Sequence[Any]) -> bool:
    if any(isinstance(tensor, tf.IndexedSlices) or not tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    numbers = sum(tensor.shape.num_elements() for tensor in tensors)
    return len({tensor.dtype for tensor in tensors}) == 1 and numbers * tensors[0].dtype.size <= LARGEST_SWAP
