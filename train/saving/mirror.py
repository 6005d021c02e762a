"""Trees of variables that TensorFlow saves, in which each variable is replaced by a copy or left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable  # has no public name


def has_value(variable: Any) -> bool:
    """Whether a variable has a value in this task; those of stages of other tasks have none."""
    stored = variable if isinstance(variable, tf.Variable) else variable.value
    return not isinstance(stored, UninitializedVariable)


class Mirror:
    """The tree that TensorFlow saves for a checkpoint, with each variable replaced.

    Files of the one can be restored to the other.

    Attributes:
        checkpoint: the tree.
        pairs: each variable and its replacement.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, replace: Callable[[tf.Variable], tf.Variable | None]) -> None:
        """Build the tree; `replace` returns the replacement of a variable, or None to leave it out."""
        self.pairs: list[tuple[tf.Variable, tf.Variable]] = []
        self._view, self._replace = tf.train.TrackableView(checkpoint), replace
        self._nodes: dict[int, tf.Module | tf.Variable | None] = {}
        children = self._view.children(checkpoint).items()
        nodes = {name: self._node(child) for name, child in children if name != "save_counter"}
        self.checkpoint = tf.train.Checkpoint(**{name: node for name, node in nodes.items() if node is not None})

    def _node(self, node: object) -> tf.Module | tf.Variable | None:
        if id(node) in self._nodes:
            return self._nodes[id(node)]
        value = node if isinstance(node, tf.Variable) else getattr(node, "value", None)  # Keras 3 wraps its variables
        if isinstance(value, tf.Variable):
            replacement = self._nodes[id(node)] = self._replace(value)
            if replacement is not None:
                self.pairs.append((value, replacement))
            return replacement
        module = self._nodes[id(node)] = tf.Module()
        for name, child in self._view.children(node).items():
            if (replaced := self._node(child)) is not None:
                setattr(module, name, replaced)
        return module


class Copy(Mirror):
    """A copy of a checkpoint's variables, as plain variables in this task's memory.

    TensorFlow's asynchronous checkpoints do the same, but fail with Keras 3's variables.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, names: Mapping[int, str] | None = None) -> None:
        """Copy the variables; those without a value, which another task has, stay without one.

        Args:
            names: names of variables, by `id`, which are saved with their values.
        """
        known = names or {}
        with tf.device("CPU:0"):
            super().__init__(checkpoint, lambda variable: _copied(variable, known.get(id(variable))))

    def update(self) -> None:
        """Copy the current values."""
        for original, copy in self.pairs:
            if not isinstance(copy, UninitializedVariable):
                copy.assign(original)

    def not_finite(self, variables: Sequence[Any]) -> str | None:
        """Return the name of the first variable whose copy is not finite; None if all are finite."""
        copies = {id(original): copy for original, copy in self.pairs}
        for variable in variables:
            copy = copies.get(id(variable if isinstance(variable, tf.Variable) else variable.value))
            if copy is None or isinstance(copy, UninitializedVariable):
                continue
            if not bool(tf.math.is_finite(tf.reduce_sum(tf.cast(copy, tf.float32)))):
                return str(getattr(variable, "path", variable.name))
        return None


def _copied(variable: tf.Variable, name: str | None) -> tf.Variable:
    if isinstance(variable, UninitializedVariable):
        return UninitializedVariable(trainable=False, shape=variable.shape, dtype=variable.dtype, name=name)
    return tf.Variable(variable, trainable=False, dtype=variable.dtype, name=name)
