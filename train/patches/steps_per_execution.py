"""`Model.fit` with `steps_per_execution` above 1 works on several replicas, where conditional updates are refused.

Defect: `TensorFlowTrainer._make_function` puts the steps after the first into `tf.cond`, where replicas' variables
cannot be captured. Keras issue 20585.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_every_script_patch_must_still_be_needed
Not applied: if the source of `_make_function` has no `tf.cond`, or depends on the number of replicas.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer  # has no public name

from .symbolic_build import optimizers_of

_keras_make_function = trainer.TensorFlowTrainer._make_function


def _make_function(model: Any, step_function: Any) -> Any:
    several = model.distribute_strategy.num_replicas_in_sync > 1
    if several and step_function == model.train_step and not model.jit_compile:
        _refuse_conditional_updates(model)
    execute = _keras_make_function(model, step_function)
    if model.steps_per_execution == 1 or not several:
        return execute

    def function(iterator: Any) -> Any:
        if isinstance(iterator, tf.distribute.DistributedIterator):
            iterator = _batches(iterator)
            first = next(iterator)  # ends the epoch if there is none
            iterator = itertools.chain([first], iterator)
        return execute(iterator)  # Keras runs step after step on an iterator that is not TensorFlow's

    return function


def _refuse_conditional_updates(model: Any) -> None:
    """Refuse what Keras puts into `tf.cond`, where TensorFlow without XLA lets replicas exchange nothing."""
    optimizers = optimizers_of(model)
    for option in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if any(getattr(optimizer, option) for optimizer in optimizers):
            raise ValueError(f"Keras 3 cannot use the optimizer's {option} on several replicas: leave it out")


def _batches(iterator: Any) -> Iterator[Any]:
    """Yield batches; requesting one too many inside a step would count a step without examples."""
    while (batch := iterator.get_next_as_optional()).has_value():
        yield batch.get_value()


REPLACED = [
    (
        trainer.TensorFlowTrainer,
        "_make_function",
        _make_function,
        {"defect": r"tf\.cond\(", "fixed": "num_replicas_in_sync"},
    )
]
