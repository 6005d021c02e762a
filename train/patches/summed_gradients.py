"""An optimizer applies gradients that are already summed over replicas.

Defect: `apply_gradients` of Keras 3 sums over replicas without a way to turn that off, which gives R times each
gradient on R replicas; dividing by R first would lose bits. tf_keras has an argument for it.
Versions: Keras 3.15.1.
Test: tests/differential/test_differential.py::test_a_case_must_train_as_plain_keras_does_or_be_refused
Not applied: if the optimizer has no `_all_reduce_sum_gradients`.
"""

import keras


def take_summed_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Stop an optimizer from summing gradients over replicas. Idempotent."""
    if hasattr(optimizer, "_all_reduce_sum_gradients"):
        optimizer._all_reduce_sum_gradients = list  # takes and returns pairs of gradient and variable
