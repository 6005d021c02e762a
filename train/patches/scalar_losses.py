"""A loss that is one number, such as the mean over a batch, is divided by the number of replicas, as all others are.

A loss without reduction, which Keras does not divide, is not multiplied by that number where it is reported.

Defect: `reduce_values` returns a number as it is, so gradients and the reported loss are too large by the number of
replicas. With `reduction=None`, only the reported loss is. Keras 2 divided such a number.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_a_loss_that_is_one_number_must_train_as_in_one_process
Not applied: to the gradients of the reductions "sum" and "none", nor where sample weights make it several numbers.
"""

from typing import Any

from keras.src.losses import loss  # has no public name

_keras_reduce, _keras_unscale = loss.reduce_values, loss.unscale_loss_for_distribution


def _reduce(values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size") -> Any:
    reduced = _keras_reduce(values, sample_weight, reduction)
    mean = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    return loss.scale_loss_for_distribution(reduced) if mean and tuple(values.shape) == () else reduced


def _unscale(value: Any) -> Any:
    return value if value.shape.rank else _keras_unscale(value)


REPLACED = [
    (loss, "reduce_values", _reduce, {"defect": r"tuple\(values\.shape\) == \(\)"}),
    (loss, "unscale_loss_for_distribution", _unscale, {"fixed": "shape"}),
]
