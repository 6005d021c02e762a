"""Checks of a user's model for `--loop fit`, whose own `train_step` and `compute_loss` Keras calls."""

import inspect
import types
from typing import Any

from tensorflow import keras

from cluster.system.errors import UsageError
from cluster.system.terminal import warn
from train.config import TrainConfig
from train.model import layer_state, models

DIVIDING = frozenset({"compute_average_loss", "num_replicas_in_sync", "scale_loss_for_distribution"})
"""Names in code that divides a loss by the number of replicas."""
OF_KERAS = frozenset({"_compute_loss", "compute_loss", "train_step"})
"""Methods of Keras's models that do."""


def check_model(config: TrainConfig, model: keras.Model, strategy: str, replicas: int) -> None:
    """Check that Keras's `fit` can train a model; warn of a loss that is too large on several replicas."""
    if config.micro_batches > 1:
        _check_micro_batches(model, replicas, config.micro_batches)
    if not config.needs_tf_keras(strategy):
        _check_optimizers(model)
        warn_of_sum(model, replicas)


def _check_micro_batches(model: keras.Model, replicas: int, micro_batches: int) -> None:
    option = f"--micro-batches {micro_batches} with --loop fit"
    if method := models.find_override(model):
        raise UsageError(
            f"{option}: {type(model).__name__} overrides {method}, which takes whole batches; leave --micro-batches out"
        )
    if replicas > 1 and any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()):
        raise UsageError(f"{option}: BatchNormalization over {replicas} replicas needs --loop custom")


def _check_optimizers(model: keras.Model) -> None:
    """Check that no optimizer of the model itself would create variables in `train_step`, which no checkpoint has."""
    owned = layer_state.own_optimizers(model)
    if unbuilt := [name for name, optimizer in owned.items() if not optimizer.built]:
        raise UsageError(
            f"--loop fit: {type(model).__name__}.{unbuilt[0]} has no variables yet; call its build(variables) where "
            "the model is made"
        )


def warn_of_sum(model: keras.Model, replicas: int) -> None:
    """Warn of a loss that is not divided by the number of replicas, whose gradients are added up."""
    if replicas == 1 or not (method := models.find_override(model)):
        return
    functions = _own_functions(model)
    used, dividing = set().union(*(_names_in(function.__code__) for function in functions)), DIVIDING
    own_loss = _function(type(model).compute_loss) if type(model).compute_loss is not keras.Model.compute_loss else None
    if own_loss is None or OF_KERAS & _names_in(own_loss.__code__):
        dividing |= OF_KERAS
    else:
        method = "compute_loss"
    if not dividing & used and not _uses_keras_loss(model, functions, used):
        warn(
            f"the gradients of {replicas} replicas are added up, and {type(model).__name__}.{method} does not divide "
            "its loss by their number, as Keras's compute_loss and losses do; divide it by "
            "tf.distribute.get_strategy().num_replicas_in_sync, but not what its metrics are given"
        )


def _uses_keras_loss(model: keras.Model, functions: list[types.FunctionType], used: set[str]) -> bool:
    """Whether a model's methods use loss objects of Keras, which divide what they reduce."""
    values = [value for layer in model._flatten_layers() for value in vars(layer).values()]
    values += [value for kind in type(model).__mro__ for name, value in vars(kind).items() if name in used]
    values += [value for function in functions for value in _values_in(function)]
    for value in list(values):
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    kinds = {name for name, kind in vars(keras.losses).items() if isinstance(kind, type)}
    held = [value for value in values if isinstance(value, keras.losses.Loss)]
    return bool(kinds & used) or any(loss.reduction not in (None, "none") for loss in held)


def _own_functions(model: keras.Model) -> list[types.FunctionType]:
    """Return the methods of a model's classes outside of Keras, without `__init__`, and the functions they call."""
    theirs = [vars(each).items() for each in type(model).__mro__ if not each.__module__.startswith("keras.")]
    found = [method for methods in theirs for name, method in methods if name != "__init__"]
    functions = list[types.FunctionType]()
    while found:
        function = _function(found.pop())
        library = str(getattr(function, "__module__", "")).startswith(("keras", "tensorflow", "numpy"))
        if inspect.isfunction(function) and not library and function not in functions:
            functions.append(function)
            found += _values_in(function)
    return functions


def _values_in(function: types.FunctionType) -> list[Any]:
    """Return the global variables and those of enclosing functions that a function uses."""
    names = _names_in(function.__code__) & function.__globals__.keys()
    return [*(function.__globals__[name] for name in names), *inspect.getclosurevars(function).nonlocals.values()]


def _function(method: Any) -> Any:
    return getattr(method, "python_function", method)  # of a `tf.function`


def _names_in(code: types.CodeType) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)
