"""Trees of variables that TensorFlow saves, and checkpoints that several tasks write together.

In a tree each variable can be replaced by a copy or left out. In a joint checkpoint each task writes the variables that
only it has:

    checkpoints/.ckpt-<generation>-joint-<save>/2.index  2.data-00000-of-00001   files of task 2
    checkpoints/.ckpt-<generation>-joint-<save>/2.json                           marks them as complete; written last

The first task waits for the others and merges all files, which TensorFlow does without copying them. The result is the
same as a checkpoint of one task: any number of tasks can restore it.
"""

import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow import keras
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable  # has no public name

from cluster.system.errors import RunFailed
from cluster.system.json_files import read_json, write_json
from cluster.system.messages import described
from cluster.system.waiting import wait_until
from train.model import layer_state

PAUSE_S = 0.01


def unwrap(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable inside a variable of either Keras."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def has_value(variable: Any) -> bool:
    """Whether a variable has a value in this task; variables of other tasks' stages have none."""
    return not isinstance(unwrap(variable), UninitializedVariable)


def rate_variable(optimizer: Any) -> Any:
    """Return the variable of a constant learning rate, which callbacks may set; None if the rate is a schedule."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, (tf.Variable, getattr(keras, "Variable", tf.Variable))) else None


def as_saved(optimizer: Any, prefix: str) -> Any:
    """Return an optimizer as in a checkpoint: with or without a variable of the learning rate.

    A run may be resumed with callbacks, which need the variable, or with another schedule.
    """
    rate, saved = rate_variable(optimizer), tf.train.list_variables(prefix)
    with_rate = any(name.startswith("optimizer/_learning_rate/") for name, _ in saved)
    step, *slots = [variable for variable in optimizer.variables if variable is not rate]
    if isinstance(step, tf.Variable) or with_rate == (rate is not None):  # tf_keras does not list the rate
        return optimizer
    tree = tf.Module()
    tree._variables = [step, *([tf.Variable(0.0)] if with_rate else []), *slots]
    return tree


class Mirror:
    """The tree that TensorFlow saves for a checkpoint, with each variable replaced.

    Files saved from one tree can be restored to the other.

    Attributes:
        checkpoint: the tree.
        pairs: each variable and its replacement.
        paths: the place of each of these variables in the tree, the same in every process.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, replace: Callable[[tf.Variable], tf.Variable | None]) -> None:
        """Build the tree; `replace` returns the replacement of a variable, or None to leave it out."""
        self.pairs: list[tuple[tf.Variable, tf.Variable]] = []
        self.paths: list[str] = []
        self._view, self._replace = tf.train.TrackableView(checkpoint), replace
        self._nodes: dict[int, tf.Module | tf.Variable | None] = {}
        children = self._view.children(checkpoint).items()
        nodes = {name: self._node(child, name) for name, child in children if name != "save_counter"}
        self.checkpoint = tf.train.Checkpoint(**{name: node for name, node in nodes.items() if node is not None})

    def _node(self, node: object, path: str) -> tf.Module | tf.Variable | None:
        if id(node) in self._nodes:
            return self._nodes[id(node)]
        value = node if isinstance(node, tf.Variable) else getattr(node, "value", None)  # Keras 3 wraps its variables
        if isinstance(value, tf.Variable):
            replacement = self._nodes[id(node)] = self._replace(value)
            if replacement is not None:
                self.pairs.append((value, replacement))
                self.paths.append(path)
            return replacement
        module = self._nodes[id(node)] = tf.Module()
        for name, child in self._view.children(node).items():
            if (replaced := self._node(child, f"{path}/{name}")) is not None:
                setattr(module, name, replaced)
        return module


def all_variables(model: Any) -> list[tf.Variable]:
    """Return a model's variables in the same order in every process, without metrics, and first those of Keras."""
    if (metrics := getattr(model, "metrics_variables", None)) is None:  # tf_keras, which knows all variables
        return list(model.weights)
    of_metrics = {id(variable) for variable in metrics}
    variables = [unwrap(variable) for variable in model.variables if id(variable) not in of_metrics]
    return [*variables, *layer_state.tensorflow_variables(model).values()]


def parts_of_model(model: Any) -> dict[str, Any]:
    """Return the parts of a checkpoint for a model: the model, and `untracked` with variables that TensorFlow misses.

    `own_optimizers` has those of the model's own optimizers, which only a training needs.

    TensorFlow finds variables by the attributes of layers, but Keras 3 hides lists and dictionaries from it
    (`keras/src/backend/tensorflow/trackable.py`), such as the layers of `self.blocks = [...]`. Their variables are
    numbered in the model's order.
    """
    found = Mirror(tf.train.Checkpoint(model=model), lambda variable: variable).pairs
    known = {id(variable) for variable, _ in found}
    # Without the states of random generators, from which steps do not draw.
    parts = {"untracked": [*map(unwrap, model.weights), *layer_state.tensorflow_variables(model).values()]}
    if hasattr(model, "metrics_variables"):  # not tf_keras, which hides nothing
        optimizers = layer_state.own_optimizers(model).values()
        parts["own_optimizers"] = [unwrap(variable) for optimizer in optimizers for variable in optimizer.variables]
    modules = {name: tf.Module() for name in parts}
    for name, module in modules.items():
        for number, variable in enumerate(parts[name]):
            if id(variable) not in known:
                setattr(module, f"variable_{number}", variable)
    return {"model": model} | {name: module for name, module in modules.items() if module.variables}


class Snapshot(Mirror):
    """A copy of a checkpoint's variables, as plain variables in this task's memory.

    TensorFlow's asynchronous checkpoints do the same, but fail with Keras 3's variables.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, names: Mapping[int, str]) -> None:
        """Copy the variables, which may lack a value in this task; `names`, by `id`, are saved with the values."""

        def copy(variable: tf.Variable) -> tf.Variable:
            name = names.get(id(variable))
            if not has_value(variable):
                return _new_handle(variable, name)
            return tf.Variable(variable, trainable=False, dtype=variable.dtype, name=name)

        with tf.device("CPU:0"):
            super().__init__(checkpoint, copy)

    def update(self) -> None:
        for original, copy in self.pairs:
            if has_value(copy):
                copy.assign(original)

    def not_finite(self, variables: Sequence[Any]) -> str | None:
        """Return the name of the first variable whose copy is not finite; None if all are finite."""
        copies = {id(original): copy for original, copy in self.pairs}
        for variable in variables:
            copy = copies.get(id(unwrap(variable)))
            if copy is None or not has_value(copy):
                continue
            if not bool(tf.math.is_finite(tf.reduce_sum(tf.cast(copy, tf.float32)))):
                return str(getattr(variable, "path", variable.name))
        return None


def _new_handle(variable: tf.Variable, name: str | None) -> UninitializedVariable:
    return UninitializedVariable(trainable=False, shape=variable.shape, dtype=variable.dtype, name=name)


@dataclass
class Joint:
    """This task's part in the checkpoints that several tasks write together.

    Attributes:
        number: number of this task; 0 merges the files and writes the variables that all tasks have.
        count: number of tasks that write.
        owns: returns whether only this task has a variable.
        limit_s: longest wait for the other tasks, in seconds.
    """

    number: int
    count: int
    owns: Callable[[tf.Variable], bool]
    limit_s: float
    _saves: int = 0
    _keys: dict[int, str] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether this task writes; of equal tasks only one does."""
        return self.number < self.count

    def save(self, copy: Snapshot, folder: Path, generation: int, problem: str) -> Callable[[str], object] | None:
        """Write this task's files; on the first task return the function that writes the joined files.

        All tasks call it for the same checkpoints in the same order. `problem` is the reason why this task's variables
        must not be saved, or empty.
        """
        self._saves += 1
        parts = folder / f".ckpt-{generation}-joint-{self._saves}"
        if self.number == 0:
            return functools.partial(self._join, copy.checkpoint, parts)
        parts.mkdir(parents=True, exist_ok=True)
        try:
            if not problem:
                self._write(copy, parts)
        except Exception as error:
            problem = f"stage {self.number} cannot write its part of a checkpoint: {described(error)}"
            raise
        finally:
            write_json(parts / f"{self.number}.json", {"problem": problem})
        return None

    def _write(self, copy: Snapshot, parts: Path) -> None:
        owned = [copied for original, copied in copy.pairs if self.owns(original)]
        if not self._keys:  # to find them, the tree is written without values to temporary files
            variables: dict[str, tf.Variable] = {}

            def without_value(variable: tf.Variable) -> tf.Variable:
                name = f"variable_{len(variables)}"
                variables[name] = variable
                return _new_handle(variable, name)

            scratch = str(parts / f"keys-{self.number}")
            Mirror(copy.checkpoint, without_value).checkpoint.write(scratch)
            self._keys = {id(variables[name]): key for name, key in read_keys(scratch).items() if name in variables}
        tf.raw_ops.SaveV2(
            prefix=str(parts / str(self.number)),
            tensor_names=[self._keys[id(variable)] for variable in owned],
            shape_and_slices=[""] * len(owned),
            tensors=[variable.read_value() for variable in owned],
        )

    def _join(self, checkpoint: tf.train.Checkpoint, parts: Path, prefix: str) -> None:
        """Write the first task's files, wait for those of the others, and merge all."""
        parts.mkdir(parents=True, exist_ok=True)
        checkpoint.write(str(parts / "0"))
        deadline = time.monotonic() + self.limit_s
        for number in range(1, self.count):
            done = parts / f"{number}.json"
            if not wait_until(done.exists, deadline - time.monotonic(), PAUSE_S):
                raise RunFailed(f"stage {number} has not written its part of a checkpoint within {self.limit_s:g} s")
            if problem := read_json(done)["problem"]:
                raise RunFailed(problem)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(parts / str(number)) for number in range(self.count)],
            destination_prefix=prefix,
            delete_old_dirs=False,
        )
        shutil.rmtree(parts, ignore_errors=True)


def read_keys(prefix: str) -> dict[str, str]:
    """Return the keys of the values in a checkpoint's files, by the names of the variables."""
    graph = tf.train.load_checkpoint(prefix).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    nodes = TrackableObjectGraph.FromString(graph).nodes
    return {attribute.full_name: attribute.checkpoint_key for node in nodes for attribute in node.attributes}
