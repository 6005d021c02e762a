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
    if unbuilt := [name for name, optimizer in layer_state.own_optimizers(model).items() if not optimizer.built]:
        attribute = f"{type(model).__name__}.{unbuilt[0]}"
        raise UsageError(f"--loop fit: {attribute} has no variables; call its build(variables) in the model's function")


def warn_of_sum(model: keras.Model, replicas: int) -> None:
    """Warn of a loss that is not divided by the number of replicas, whose gradients are added up."""
    if replicas == 1 or not (method := models.find_override(model)):
        return
    functions, values = _find_used(model)
    names, dividing = set().union(*(_names_in(function.__code__) for function in functions)), DIVIDING
    compute_loss = _function(type(model).compute_loss)
    if compute_loss is keras.Model.compute_loss or OF_KERAS & _names_in(compute_loss.__code__):
        dividing |= OF_KERAS
    else:
        method = "compute_loss"
    dividing |= {name for name, kind in vars(keras.losses).items() if isinstance(kind, type)}  # what they reduce
    losses = [value for value in values if isinstance(value, keras.losses.Loss)]
    if not dividing & names and all(loss.reduction in (None, "none") for loss in losses):
        warn(
            f"the gradients of {replicas} replicas are added up, and {type(model).__name__}.{method} does not divide "
            "its loss by their number, as Keras's compute_loss and losses do; divide it by "
            "tf.distribute.get_strategy().num_replicas_in_sync, but not the loss that its metrics take"
        )


def _find_used(model: keras.Model) -> tuple[list[types.FunctionType], list[Any]]:
    """Return the methods of a model's classes outside of Keras with the functions they call, and the values they use.

    The values include the attributes of layers, and those in lists and dictionaries.
    """
    classes = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("keras.")]
    found = [value for kind in classes for name, value in vars(kind).items() if name != "__init__"]
    functions = list[types.FunctionType]()
    values = [value for layer in model._flatten_layers() for value in vars(layer).values()]
    while found:
        value = _function(found.pop())
        if not inspect.isfunction(value):
            values.append(value)
        elif value not in functions and not str(value.__module__).startswith(("keras", "tensorflow", "numpy")):
            functions.append(value)
            names = _names_in(value.__code__) & value.__globals__.keys()
            found += [*(value.__globals__[name] for name in names), *inspect.getclosurevars(value).nonlocals.values()]
    for value in list(values):
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return functions, values


def _function(method: Any) -> Any:
    return getattr(method, "python_function", method)  # of a `tf.function`


def _names_in(code: types.CodeType) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)
