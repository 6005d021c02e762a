"""A loss that is one number, such as the mean over a batch, is divided by the number of replicas, as all others are.

Defect: `reduce_values` returns a number as it is. Replicas' gradients are then as many times too large as there are
replicas, and so is the reported loss, which Keras multiplies by their number. Keras 2 divided it.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_a_loss_that_is_one_number_must_train_as_in_one_process
Not applied: to the reductions "sum" and "none", and where sample weights or masks make several numbers of it.
"""

from typing import Any

from keras.src.losses import loss  # has no public name

_keras_reduce = loss.reduce_values


def _reduce(values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size") -> Any:
    reduced = _keras_reduce(values, sample_weight, reduction)
    mean = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    return loss.scale_loss_for_distribution(reduced) if mean and tuple(values.shape) == () else reduced


REPLACED = [(loss, "reduce_values", _reduce, {"defect": r"tuple\(values\.shape\) == \(\)"})]
