"""Mends `Model.fit`, `evaluate` and `predict` of Keras 3 under MultiWorkerMirroredStrategy (keras issue 20585).

Three defects of `keras/src/backend/tensorflow/trainer.py`, found in Keras 3.15.1.
docs/internals/upstream/keras-20585.md explains each, and has the patch for Keras.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import trainer  # has no public name


def apply() -> list[str]:
    """Patch Keras's trainer where it still has a defect; return the names of what was replaced.

    Idempotent: what is mended has none.
    """
    replaced = []
    if builds_from_a_reduced_batch():
        trainer.TensorFlowTrainer._maybe_symbolic_build = _maybe_symbolic_build
        replaced.append("_maybe_symbolic_build")
    if reduces_scalars_along_an_axis():
        trainer.reduce_per_replica = _reduce_per_replica(trainer.reduce_per_replica)
        replaced.append("reduce_per_replica")
    if runs_steps_inside_of_conditions():
        trainer.TensorFlowTrainer._make_function = _make_function(trainer.TensorFlowTrainer._make_function)
        replaced.append("_make_function")
    return replaced


def builds_from_a_reduced_batch() -> bool:
    """Whether the model is built from a batch that was averaged over the replicas, as a whole: collectives take parts.

    Tried on a batch of one value, without TensorFlow.
    """
    strategy = _Recorder()
    model = SimpleNamespace(
        _distribute_strategy=strategy, distribute_strategy=strategy, _symbolic_build=lambda data_batch: None
    )
    with contextlib.suppress(Exception):  # of a Keras that does something else
        trainer.TensorFlowTrainer._maybe_symbolic_build(model, iterator=[(0, 0, iter([(_Distributed(),)]))])
    return bool(strategy.reduced)


def reduces_scalars_along_an_axis() -> bool:
    """Whether a metric, which is a scalar, is averaged over several tasks along its first axis, which it has not."""
    strategy = _Recorder()
    with contextlib.suppress(Exception):
        trainer.reduce_per_replica(1.0, strategy, "mean")
    return strategy.reduced == [0]


def runs_steps_inside_of_conditions() -> bool:
    """Whether several steps of one execution stand inside of `tf.cond`, where replicas' variables cannot be captured.

    By its source: to try it takes two devices.
    """
    source = inspect.getsource(trainer.TensorFlowTrainer._make_function)
    return "tf.cond(" in source and "num_replicas_in_sync" not in source


class _Recorder(tf.distribute.MultiWorkerMirroredStrategy):
    """A strategy of several tasks that only records along which axes it was to reduce."""

    extended = SimpleNamespace(_in_multi_worker_mode=lambda: True)

    def __init__(self) -> None:  # no cluster is formed
        self.reduced: list[int | None] = []

    def reduce(self, _operation: Any, value: Any, axis: int | None = None) -> Any:
        self.reduced.append(axis)
        return value

    def experimental_local_results(self, value: Any) -> tuple[Any]:
        return (value,)

    def scope(self) -> Any:
        return contextlib.nullcontext()


class _Distributed(tf.distribute.DistributedValues):
    """A value of some replicas."""


def _maybe_symbolic_build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Build the model, its metrics and its loss from the shapes of one replica's part of a batch."""
    strategy = model._distribute_strategy
    if strategy is None:
        return
    if iterator is not None:
        for _, _, batches in iterator:
            data_batch = tree.map_structure(lambda each: strategy.experimental_local_results(each)[0], next(batches))
            break
    with strategy.scope():
        if type(model).call is not keras.Model.call:
            model._symbolic_build(data_batch=data_batch)
        else:  # it trains by a `train_step` alone, which Keras cannot call with symbols
            _build_optimizer(model, strategy.num_replicas_in_sync)


def _build_optimizer(model: Any, num_replicas: int) -> None:
    """Build the optimizer of a model without `call`, whose layers and other optimizers the user has built.

    Raises:
        ValueError: they are not built, and several replicas cannot do so in a step.
    """
    unbuilt = [layer.name for layer in model._flatten_layers(include_self=False) if not layer.built]
    if not unbuilt:
        if model.optimizer is not None:
            model.optimizer.build(model.trainable_variables)
        optimizers = {name: part for name, part in vars(model).items() if isinstance(part, keras.optimizers.Optimizer)}
        unbuilt = [name for name, optimizer in optimizers.items() if not optimizer.built]
    if unbuilt and num_replicas > 1:
        raise ValueError(
            f"{type(model).__name__} has a train_step and no call: on {num_replicas} replicas build "
            f"{', '.join(unbuilt)} before fit: layers with build(input_shape) or a keras.Input, "
            "optimizers with build(variables)"
        )


def _reduce_per_replica(original: Any) -> Any:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        """Reduce each replica's values, which may be scalars, to those of all replicas of all tasks."""
        multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if reduction in ("auto", "mean", "sum") and multi_worker and strategy.extended._in_multi_worker_mode():
            operation = "SUM" if reduction == "sum" else "MEAN"
            return tree.map_structure(lambda value: strategy.reduce(operation, value, axis=None), values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _make_function(original: Any) -> Any:
    def make_function(model: Any, step_function: Any) -> Any:
        """Return a function that calls a step as often as `steps_per_execution` says, or until the data ends."""
        execute = original(model, step_function)
        if model.steps_per_execution == 1 or model.distribute_strategy.num_replicas_in_sync == 1:
            return execute

        def function(iterator: Any) -> Any:
            if isinstance(iterator, tf.distribute.DistributedIterator):
                iterator = _batches(iterator)
                first = next(iterator)  # ends the epoch if there is none
                iterator = itertools.chain([first], iterator)
            return execute(iterator)  # with what is no iterator of TensorFlow's it calls step after step

        return function

    return make_function


def _batches(iterator: Any) -> Iterator[Any]:
    """Yield batches: to ask for one too many inside of a step would count a step without examples."""
    while (batch := iterator.get_next_as_optional()).has_value():
        yield batch.get_value()
