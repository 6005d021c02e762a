"""What is done with gradients before they change the weights: summed over replicas, scaled back, clipped, skipped.

Keras clips what each replica has before the sum, and asks each replica by itself whether its gradients are finite: so
its own clipping depends on the number of replicas, and its loss scaling can leave them with different weights.

Loss scaling: P. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.errors import RunFailed
from train.model import keras_compat
from train.saving.checkpoint import diverged

FIRST_SCALE, LARGEST_SCALE = 2.0**15, 2.0**24
GROWS_AFTER = 2000
"""Steps without an overflow after which the scale is doubled."""

Gradients = Sequence[Any]
"""Of each variable a tensor, slices of one, or None."""
Apply = Callable[[Any, Any], object]


class LossScale(tf.Module):
    """What the loss is multiplied by, so that small gradients are no zeros in float16; always a power of two.

    It falls below 1 where even 1 was too large: there training cannot go on.
    """

    def __init__(self) -> None:
        """Begin with `FIRST_SCALE`. Call inside the strategy's scope."""
        super().__init__(name="loss_scale")
        shared: dict[str, Any] = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
        self.scale = tf.Variable(FIRST_SCALE, dtype=tf.float32, **shared)
        self.good_steps = tf.Variable(0, dtype=tf.int64, **shared)
        self.skipped_steps = tf.Variable(0, dtype=tf.int64, **shared)

    @property
    def exhausted(self) -> bool:
        """Whether gradients overflowed at 1."""
        return float(self.scale.numpy()) < 1

    def shown(self) -> dict[str, float]:
        """Return what metrics tell of it."""
        return {"loss_scale": float(self.scale.numpy()), "skipped_steps": int(self.skipped_steps.numpy())}

    def update(self, finite: tf.Tensor) -> None:
        """Take over whether a step's gradients were finite; every replica calls it with the same."""
        scale, good = tf.convert_to_tensor(self.scale), tf.convert_to_tensor(self.good_steps) + 1
        grows = good >= GROWS_AFTER
        grown = tf.where(grows, tf.minimum(2 * scale, LARGEST_SCALE), scale)
        zero = tf.zeros([], tf.int64)
        skipped = tf.convert_to_tensor(self.skipped_steps) + tf.cast(~finite, tf.int64)
        self.scale.assign(tf.where(finite, grown, scale / 2))
        self.good_steps.assign(tf.where(finite & ~grows, good, zero))
        self.skipped_steps.assign(skipped)


@dataclass
class Descent:
    """What an optimizer does with gradients first."""

    clip_norm: float
    loss_scale: LossScale | None
    sums_up: bool = True
    """Whether what replicas have is still to be added up."""

    def take(self, gradients: Gradients, variables: Sequence[Any], apply: Apply) -> None:
        """Apply the gradient of the whole global batch, unless it is not finite; every replica calls it.

        Args:
            gradients: of this replica's scaled loss, or of all replicas' already.
            variables: whose gradients they are.
            apply: takes gradients and variables.
        """
        pairs = [(one, other) for one, other in zip(gradients, variables, strict=True) if one is not None]
        # As tensors: slices can name a row twice, and have another norm then.
        total = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
        known = [variable for _, variable in pairs]
        if self.sums_up:
            total = summed(total)
        scale = self.loss_scale
        if scale is None:
            apply(self._clipped(total), known)
            return
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in total])
        factor = 1 / tf.convert_to_tensor(scale.scale)
        clipped = self._clipped([gradient * factor for gradient in total])
        _apply_if(finite, clipped, lambda gradients: apply(gradients, known))
        scale.update(finite)

    def _clipped(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return tf.clip_by_global_norm(gradients, self.clip_norm)[0] if self.clip_norm else gradients


def govern(optimizer: Any, clip_norm: float, *, scaled: bool) -> None:
    """Have an optimizer of either Keras clip by the norm of the global batch's gradient, and scale the loss.

    Its variables stay those that it has anyway. Call inside the strategy's scope, before the optimizer is used.

    Args:
        optimizer: from Keras, unused.
        clip_norm: largest norm; 0: none.
        scaled: whether gradients are computed in float16.
    """
    descent = Descent(clip_norm, LossScale() if scaled else None)
    optimizer.descent = descent
    if hasattr(optimizer, "aggregate_gradients"):  # tf_keras
        apply_gradients = optimizer.apply_gradients

        def apply_summed(gradients: Any, variables: Any) -> None:
            apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)

        def governed(pairs: Any, **_options: Any) -> tf.Variable:
            gradients, variables = zip(*pairs, strict=True)
            descent.take(gradients, variables, apply_summed)
            return optimizer.iterations

        def compute(loss: tf.Tensor, variables: Any, tape: tf.GradientTape) -> list[tuple[Any, Any]]:
            gradients = tape.gradient(loss, variables, output_gradients=seed(optimizer))
            return list(zip(gradients, variables, strict=True))

        optimizer.apply_gradients, optimizer.compute_gradients = governed, compute
        return
    keras_compat.take_summed_gradients(optimizer)
    apply = optimizer.apply
    optimizer.apply = lambda gradients, variables: descent.take(gradients, variables, apply)
    optimizer.scale_loss = lambda loss: loss if (scale := seed(optimizer)) is None else loss * scale


def of(optimizer: Any) -> Descent | None:
    """Return what `govern` put on an optimizer, if it did."""
    return getattr(optimizer, "descent", None)


def loss_scale(optimizer: Any) -> LossScale | None:
    """Return what scales an optimizer's losses, if anything does."""
    return found.loss_scale if (found := of(optimizer)) else None


def seed(optimizer: Any) -> tf.Tensor | None:
    """Return what the gradient of the loss with respect to itself is to be: the loss scale; None for 1."""
    return None if (found := loss_scale(optimizer)) is None else tf.convert_to_tensor(found.scale)


def told(optimizer: Any, loss: tf.Tensor, gradients: Gradients) -> tf.Tensor:
    """Return the loss once its gradients were applied; NaN where training must end for them."""
    if (found := loss_scale(optimizer)) is None:
        return keras_compat.told_of_broken(loss, gradients)
    return tf.where(tf.convert_to_tensor(found.scale) < 1, tf.constant(float("nan"), loss.dtype), loss)


def watched(inner: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Return an inner loop that says so where training must end because the loss scale is exhausted."""
    if (scale := loss_scale(optimizer)) is None:
        return inner

    def run(first: int, count: int, stop: bool) -> Any:
        result = inner(first, count, stop)
        if scale.exhausted:
            bad = np.flatnonzero(~np.isfinite(result.losses))
            raise overflow(first + int(bad[0] if bad.size else count - 1) + 1)
        return result

    return run


def overflow(step: int) -> RunFailed:
    """Return the error of a training whose gradients are too large for float16."""
    return diverged(f"gradients overflow float16 at step {step} even at loss scale 1 (bf16 has float32's range)")


def summed(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sums over all replicas, in float32 as the weights are."""
    context = tf.distribute.get_replica_context()
    return gradients if context.num_replicas_in_sync == 1 else context.all_reduce("SUM", gradients)


def _apply_if(finite: tf.Tensor, gradients: list[tf.Tensor], apply: Callable[[list[tf.Tensor]], object]) -> None:
    """Apply gradients on condition of what is the same on every replica."""

    def together(strategy: tf.distribute.Strategy, finite: Any, gradients: Any) -> None:
        # What optimizers do is done for all replicas at once, which a condition inside of one replica does not allow.
        tf.cond(
            strategy.experimental_local_results(finite)[0],
            lambda: strategy.extended.call_for_each_replica(_nothing_after(apply), args=(gradients,)),
            lambda: None,
        )

    tf.distribute.get_replica_context().merge_call(together, args=(finite, gradients))


def _nothing_after(apply: Callable[[Any], object]) -> Callable[[Any], None]:
    def applied(gradients: Any) -> None:
        apply(gradients)

    return applied
