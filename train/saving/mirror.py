"""The tree of variables that TensorFlow saves, with something else in place of each variable: copies, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable  # has no public name


def has_value(variable: Any) -> bool:
    """Return whether a variable has a value in this task: that of a stage which another task has, has none."""
    own = variable if isinstance(variable, tf.Variable) else variable.value
    return not isinstance(own, UninitializedVariable)


class Mirror:
    """The tree that TensorFlow would save of a checkpoint, with something else in place of each variable.

    So what is saved of the one can be restored to the other.

    Attributes:
        checkpoint: the tree.
        pairs: each variable, and what is in its place.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, replace: Callable[[tf.Variable], tf.Variable | None]) -> None:
        """Make it.

        Args:
            checkpoint: what is mirrored.
            replace: variable -> what takes its place; None: nothing.
        """
        self.pairs: list[tuple[tf.Variable, tf.Variable]] = []
        self._view, self._replace = tf.train.TrackableView(checkpoint), replace
        self._nodes: dict[int, tf.Module | tf.Variable | None] = {}
        children = self._view.children(checkpoint).items()
        made = {name: self._of(child) for name, child in children if name != "save_counter"}
        self.checkpoint = tf.train.Checkpoint(**{name: node for name, node in made.items() if node is not None})

    def _of(self, node: object) -> tf.Module | tf.Variable | None:
        if id(node) in self._nodes:
            return self._nodes[id(node)]
        value = node if isinstance(node, tf.Variable) else getattr(node, "value", None)  # Keras 3 wraps its variables
        if isinstance(value, tf.Variable):
            found = self._nodes[id(node)] = self._replace(value)
            if found is not None:
                self.pairs.append((value, found))
            return found
        made = self._nodes[id(node)] = tf.Module()
        for name, child in self._view.children(node).items():
            if (replaced := self._of(child)) is not None:
                setattr(made, name, replaced)
        return made


class Copy(Mirror):
    """The variables of a checkpoint once more, as plain ones in this task's memory.

    TensorFlow's own asynchronous checkpoints do the same, but fail on Keras 3's variables.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, names: Mapping[int, str] | None = None) -> None:
        """Copy what has a value; what has none, because another task holds it, is there without one.

        Args:
            checkpoint: what is copied.
            names: of some variables, by their identity, which are saved beside their values.
        """
        known = names or {}
        with tf.device("CPU:0"):
            super().__init__(checkpoint, lambda variable: _copied(variable, known.get(id(variable))))

    def update(self) -> None:
        """Take over the variables' values."""
        for original, copy in self.pairs:
            if not isinstance(copy, UninitializedVariable):
                copy.assign(original)

    def not_finite(self, variables: Sequence[Any]) -> str | None:
        """Return the name of the first of these variables whose copy is not finite; None where all are."""
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
