"""The state of layers, such as moving averages, in a step of several parts: replicas, micro-batches, virtual shards.

Every part begins with the state before the step, and what the parts make of it becomes one state after them all:

    floating point               the mean over the parts: of averages over examples, that over the whole batch
    whole numbers and booleans   the same on every part, such as a count of steps; otherwise the run fails
    `aggregation="sum"`          the sum of all changes, such as a count of examples

With one part layers assign their variables as in plain Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope  # has no public name

from cluster.system.errors import RunFailed, UsageError
from train.model import exchange

_DISAGREE = "whole numbers of replicas or micro-batches differ:"


def explain(error: Exception) -> RunFailed | None:
    """Return what an error of TensorFlow says of a layer's state; None where it says something else."""
    _, disagree, rest = str(error).partition(_DISAGREE)
    if not disagree:
        return None
    return RunFailed(
        f"{rest.partition(';')[0].strip()}: replicas or micro-batches disagree on this whole number of a layer; count "
        'steps in it, or give it a floating-point type (mean) or aggregation="sum" (sum of changes)'
    )


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that layers keep for themselves: no weights, also frozen ones, no metrics, no seeds."""
    return list({id(one): one for layer in model._flatten_layers() for one in layer._non_trainable_variables}.values())


def is_separate(variable: keras.Variable) -> bool:
    """Whether the part that is traced at present has a value of its own for a variable."""
    scope = get_stateless_scope()
    return scope is not None and (not isinstance(scope, PartScope) or id(variable) in scope.first)


class PartScope(keras.StatelessScope):
    """Where a part has values of its own for some variables, and assigns the others."""

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        super().__init__(zip(variables, values, strict=True), collect_losses=True)
        self.first = dict(self.state_mapping)
        self.refusals: list[str] = []  # raised after the call of the model, which would add lines of its own

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the part's value of a variable, or the variable."""
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Assign a variable."""
        variable, value = update
        if not is_separate(variable):
            variable._direct_assign(value)
        elif variable.trainable:  # of a virtual shard
            self.refusals.append(f"--bitwise-elastic: a layer assigns the weight {variable.path}; leave it out")
        elif getattr(value, "graph", None) is not getattr(self.first[id(variable)], "graph", None):
            self.refusals.append(
                f"{variable.path} is assigned inside a condition, a loop or a tf.function; on several replicas and in "
                "micro-batches assign it outside, such as keras.ops.where(condition, new, old)"
            )
        else:
            super().add_update((variable, tf.stop_gradient(value)))  # none passes through a variable, either


class LayerState:
    """What the parts of a step make of a model's state. Methods are called on replicas, while a graph is traced."""

    def __init__(self, model: keras.Model, parts: int) -> None:
        several = parts > 1 and isinstance(model, keras.Model)  # not of tf_keras
        self.variables = variables_of(model) if several else []
        for variable in self.variables:
            if hasattr(variable._value, "_aggregation") and variable.aggregation != "none":
                variable._value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # replicas assign the same
        self._parts = parts
        self._changed: set[int] = set()

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Of what a part contributes."""
        return [_spec(variable) for variable in self.variables]

    def values(self) -> list[tf.Tensor]:
        """Return the state before the step."""
        return [tf.convert_to_tensor(variable._value) for variable in self.variables]

    @contextlib.contextmanager
    def part(
        self, weights: Sequence[keras.Variable] = (), values: Sequence[tf.Tensor] = ()
    ) -> Iterator[Callable[[], list[tf.Tensor]]]:
        """Keep what layers assign inside apart; yield a function that returns what this part contributes.

        Args:
            weights: variables that have other values inside.
            values: those.
        """
        if not self.variables and not weights:
            yield list
            return
        with PartScope([*self.variables, *weights], [*self.values(), *values]) as scope:
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
        # Equal numbers are those whose sum and sum of squares belong together.
        return after if spec.dtype.is_floating else tf.stack([after, after * after])

    def assign(
        self, contributions: Sequence[tf.Tensor], add_up: Callable[[Sequence[tf.Tensor]], list[Any]] = exchange.add_up
    ) -> None:
        """Assign the state after the step.

        Args:
            contributions: the sums of what this replica's parts contribute.
            add_up: returns the sums over all replicas of tensors of one type.
        """
        for dtype in sorted({_spec(self.variables[at]).dtype.name for at in self._changed}):
            changed = [at for at in sorted(self._changed) if _spec(self.variables[at]).dtype.name == dtype]
            for at, total in zip(changed, add_up([contributions[at] for at in changed]), strict=True):
                self._assign(self.variables[at], total)

    def _assign(self, variable: keras.Variable, total: tf.Tensor) -> None:
        own, spec = variable._value, _spec(variable)
        if variable.aggregation == "sum":
            own.assign_add(tf.cast(total, own.dtype))
        elif spec.dtype.is_floating:
            own.assign(tf.cast(total / self._parts, own.dtype))
        else:
            agree = tf.debugging.assert_equal(
                total[0] * total[0],
                total[1] * self._parts,
                f"{_DISAGREE} {variable.path};",
            )
            with tf.control_dependencies([agree]):
                value = total[0] // self._parts
            if own.dtype.is_bool:
                own.assign(tf.cast(value, own.dtype))
            else:  # loses no other task's count under parameter servers
                own.assign_add(tf.cast(value - tf.cast(tf.convert_to_tensor(own), value.dtype), own.dtype))


def _spec(variable: keras.Variable) -> tf.TensorSpec:
    own = variable._value.dtype
    if own.is_floating:
        return tf.TensorSpec(variable.shape, tf.float64 if own == tf.float64 else tf.float32)
    return tf.TensorSpec(variable.shape if variable.aggregation == "sum" else [2, *variable.shape], tf.int64)
