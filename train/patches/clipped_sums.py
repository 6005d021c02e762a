"""Optimizers of a script clip, and check for overflow, the gradient of all replicas.

Defect: Keras 3 clips each replica's gradients before their sum, so that steps are up to as many times too large. Its
LossScaleOptimizer checks each replica's: where one overflows, the others wait for it in the sum, or all apply infinity.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_gradients_must_be_clipped_and_checked_as_in_one_process
Not applied: to an optimizer that neither clips nor scales, which sums just before its update.

The built-in trainer uses `GradientPolicy` in `train/model/gradients.py` instead.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_keras_clip = keras.optimizers.Optimizer._clip_gradients
_keras_apply = keras.optimizers.LossScaleOptimizer.apply


def _sum(gradients: Sequence[Any]) -> list[Any]:
    """Sum gradients over replicas; None stays None."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return list(gradients)
    known = [gradient for gradient in gradients if gradient is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, known))
    return [None if gradient is None else next(sums) for gradient in gradients]


def _clip(optimizer: Any, gradients: Sequence[Any]) -> Any:
    if not getattr(optimizer, "_receives_sums", False):
        vars(optimizer).pop("_all_reduce_sum_gradients", None)  # of when it was clipping
        if optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue:
            gradients = _sum(gradients)
            optimizer._all_reduce_sum_gradients = list  # which comes after the clipping
    return _keras_clip(optimizer, gradients)


def _apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    optimizer.inner_optimizer._receives_sums = True
    optimizer.inner_optimizer._all_reduce_sum_gradients = list
    _keras_apply(optimizer, _sum(grads), trainable_variables)


REPLACED = [
    (keras.optimizers.Optimizer, "_clip_gradients", _clip, {"fixed": "all_reduce"}),
    (keras.optimizers.LossScaleOptimizer, "apply", _apply, {"fixed": "all_reduce"}),
]
