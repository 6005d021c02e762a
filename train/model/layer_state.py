"""The state of layers, such as moving averages, in a step of several parts: replicas, micro-batches, virtual shards.

Every part begins with the state before the step. The states after the parts are combined into one:

    floating point               the mean over the parts, which for averages over examples is that of the whole batch
    whole numbers and booleans   must be the same on every part, like a count of steps; otherwise the run fails
    `aggregation="sum"`          the sum of all changes, such as a count of examples

With one part layers assign their variables as in plain Keras.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope  # has no public name

from cluster.system.errors import RunFailed, UsageError

SENT = ("float32", "float64", "float16", "int32", "int64", "bool")
"""Types of weights that a task can send to others (the operation `CollectiveBcastSendV2`)."""
_DISAGREE = "whole numbers of replicas or micro-batches differ:"


def explain(error: Exception) -> RunFailed | None:
    """Translate TensorFlow's error about a layer's state; None for other errors."""
    _, disagree, rest = str(error).partition(_DISAGREE)
    if not disagree:
        return None
    return RunFailed(
        f"{rest.partition(';')[0].strip()}: replicas or micro-batches disagree on this whole number of a layer; count "
        'steps in it, or use a floating-point type (mean) or aggregation="sum" (sum of changes)'
    )


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Return the state of a model's layers, without weights (also frozen ones), metrics and seeds."""
    states = [state for layer in model._flatten_layers() for state in layer._non_trainable_variables]
    return list({id(state): state for state in states}.values())


def unmerged_weights(model: keras.Model) -> list[keras.Variable]:
    """Return the weights, frozen or not, that layers must not assign in a step of several parts."""
    layers = list(model._flatten_layers())
    spectral = [layer for layer in layers if isinstance(layer, keras.layers.SpectralNormalization)]
    # The parts of a step make it the same. A layer that the model does not call has none.
    normalized = {id(layer.kernel) for layer in spectral if layer.built}
    return [weight for layer in layers for weight in layer._trainable_variables if id(weight) not in normalized]


def tensorflow_variables(model: keras.Model) -> dict[str, tf.Variable]:
    """Return the `tf.Variable`s of layers that Keras does not track, by layer and attribute."""
    return {
        f"{layer.name}.{name}{place}": variable
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if not name.startswith("_self_")  # TensorFlow's own tracking, which lists the same variables again
        for place, variable in _variables_in(value).items()
    }


def check_saved(model: keras.Model, name: str) -> None:
    """Check that checkpoints and snapshots can hold each `tf.Variable` of the model that `--model` names."""
    for where, variable in tensorflow_variables(model).items():
        shape, dtype = variable.shape, variable.dtype.name
        if not shape.is_fully_defined() or (dtype == "string" and shape.rank):
            raise UsageError(
                f"--model {name!r}: {where} is a tf.Variable of {dtype} {shape}, which cannot be saved; expected "
                "numbers of a fixed shape, or one string"
            )


def check_sent(model: keras.Model, name: str) -> None:
    """Check that a task can send the first values of all weights to the others."""
    for weight in model.weights:
        if weight.dtype not in SENT:
            raise UsageError(
                f"--model {name!r}: {weight.path} is a weight in {weight.dtype}, which TensorFlow cannot send to other "
                f"tasks; expected {', '.join(SENT)}: train with --workers 0, or give its layer another dtype"
            )


def _variables_in(value: Any) -> dict[str, tf.Variable]:
    """Return a value if it is a `tf.Variable`, or those in a module, list or dictionary, by their place in it."""
    if isinstance(value, tf.Variable):
        return {"": value}
    if isinstance(value, tf.Module):
        return {f".{variable.name}": variable for variable in value.variables}
    parts: Any = ()
    if isinstance(value, list | tuple):
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    found = {f"[{key!r}]": part for key, part in parts}
    return {key + place: variable for key, part in found.items() for place, variable in _variables_in(part).items()}


def own_optimizers(model: keras.Model) -> dict[str, Any]:
    """Return the optimizers that a model applies in its `train_step`, by attribute, also those in a list or dictionary.

    That of the model's own `compile` is left out, as the run's replaces it.
    """
    owned: dict[str, Any] = {}
    for name, value in vars(model).items():
        if name.startswith("_self_"):  # TensorFlow's own tracking
            continue
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        optimizers = [part for part in parts if isinstance(part, tf.keras.optimizers.Optimizer)]
        owned |= {f"{name}[{at}]" if at else name: optimizer for at, optimizer in enumerate(optimizers)}
    owned.pop("optimizer", None)
    first = {id(optimizer): name for name, optimizer in reversed(owned.items())}  # it may have several attributes
    return {name: optimizer for name, optimizer in owned.items() if first[id(optimizer)] == name}


def find_assigned(variables: Mapping[str, tf.Variable], graph: tf.Graph) -> dict[str, tf.Variable]:
    """Return the variables that a graph assigns outside of its functions and conditions."""
    assignments = [operation for operation in graph.get_operations() if operation.type.startswith("Assign")]
    handles = {id(assignment.inputs[0]) for assignment in assignments}
    captured = [outside for outside, inside in graph.captures if id(inside) in handles]
    return {name: one for name, one in variables.items() if any(one.handle is handle for handle in captured)}


def is_separate(variable: keras.Variable) -> bool:
    """Whether the part that is being traced has a separate value for a variable."""
    scope = get_stateless_scope()
    return scope is not None and (not isinstance(scope, PartScope) or id(variable) in scope.first)


class PartScope(keras.StatelessScope):
    """Scope in which a part has separate values of some variables and assigns the others directly."""

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        super().__init__(zip(variables, values, strict=True), collect_losses=True)
        self.first = dict(self.state_mapping)
        self.refusals: list[str] = []  # raised after the model's call, in which Keras extends messages

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if not is_separate(variable):
            variable._direct_assign(value)
        elif variable.trainable:  # in a virtual shard
            self.refusals.append(f"--bitwise-elastic: a layer assigns the weight {variable.path}; remove that")
        elif getattr(value, "graph", None) is not getattr(self.first[id(variable)], "graph", None):
            self.refusals.append(
                f"{variable.path} is assigned inside a condition, a loop or a tf.function; on several replicas and in "
                "micro-batches assign it outside, such as keras.ops.where(condition, new, old)"
            )
        else:
            super().add_update((variable, tf.stop_gradient(value)))  # gradients do not pass through variables, either


class LayerState:
    """Combines the states of the parts of a step. Methods are called on replicas while a graph is traced."""

    def __init__(self, model: keras.Model, parts: int) -> None:
        self.variables = variables_of(model) if parts > 1 and isinstance(model, keras.Model) else []  # not tf_keras
        for variable in self.variables:
            if hasattr(variable._value, "_aggregation") and variable.aggregation != "none":
                variable._value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # replicas assign the same
        self._parts = parts
        self._changed: set[int] = set()

    @property
    def specs(self) -> list[tf.TensorSpec]:
        return [_spec(variable) for variable in self.variables]

    @contextlib.contextmanager
    def isolate(
        self, weights: Sequence[keras.Variable] = (), values: Sequence[tf.Tensor] = ()
    ) -> Iterator[Callable[[], list[tf.Tensor]]]:
        """Isolate assignments inside, where `weights` have `values`; yield a function that returns contributions."""
        if not self.variables and not weights:
            yield list
            return
        before = [tf.convert_to_tensor(variable._value) for variable in self.variables]
        with PartScope([*self.variables, *weights], [*before, *values]) as scope:
            yield lambda: [self._contribution(scope, at) for at in range(len(self.variables))]
        for refusal in scope.refusals:
            raise UsageError(refusal)

    def _contribution(self, scope: PartScope, at: int) -> tf.Tensor:
        variable = self.variables[at]
        before, after = scope.first[id(variable)], scope.get_current_value(variable)
        if after is not before:
            self._changed.add(at)
        spec = _spec(variable)
        before, after = tf.cast(before, spec.dtype), tf.cast(after, spec.dtype)
        if variable.aggregation == "sum":
            return after - before
        # The sum and the sum of squares show whether numbers are equal.
        return after if spec.dtype.is_floating else tf.stack([after, after * after])

    def assign(self, contributions: Sequence[tf.Tensor], add_up: Callable[[Sequence[tf.Tensor]], list[Any]]) -> None:
        """Assign the state after a step from the sums of contributions, which `add_up` adds up over replicas."""
        for dtype in sorted({_spec(self.variables[at]).dtype.name for at in self._changed}):
            changed = [at for at in sorted(self._changed) if _spec(self.variables[at]).dtype.name == dtype]
            for at, total in zip(changed, add_up([contributions[at] for at in changed]), strict=True):
                self._assign(self.variables[at], total)

    def _assign(self, variable: keras.Variable, total: tf.Tensor) -> None:
        stored, spec = variable._value, _spec(variable)
        if variable.aggregation == "sum":
            stored.assign_add(tf.cast(total, stored.dtype))
        elif spec.dtype.is_floating:
            stored.assign(tf.cast(total / self._parts, stored.dtype))
        else:
            message = f"{_DISAGREE} {variable.path};"
            agree = tf.debugging.assert_equal(total[0] * total[0], total[1] * self._parts, message)
            with tf.control_dependencies([agree]):
                value = total[0] // self._parts
            if stored.dtype.is_bool:
                stored.assign(tf.cast(value, stored.dtype))
            else:  # adding does not lose another task's count under parameter servers
                before = tf.cast(tf.convert_to_tensor(stored), value.dtype)
                stored.assign_add(tf.cast(value - before, stored.dtype))


def _spec(variable: keras.Variable) -> tf.TensorSpec:
    dtype = variable._value.dtype
    if dtype.is_floating:
        return tf.TensorSpec(variable.shape, tf.float64 if dtype == tf.float64 else tf.float32)
    return tf.TensorSpec(variable.shape if variable.aggregation == "sum" else [2, *variable.shape], tf.int64)
