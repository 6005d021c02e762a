"""The model of each stage, and what a call of it uses: weights of other stages, state, random generators.

Keras knows which layer created a variable, but not which layers read it: an output layer can multiply by the weights of
the embedding. So each stage is traced once, with zeros for variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from cluster.system.errors import UsageError
from train.model import layer_state
from train.patches import placed_seeds
from train.pipeline.blocks import ModelBlock, stage_model


@dataclass(frozen=True)
class Part:
    """A stage of a model.

    Attributes:
        model: the model of the stage, with layers and variables of the whole model.
        used: variables of the whole model that it has or reads, in the order of the whole model.
        changed: variables that it assigns in training, such as averages of batch normalization.
        drawn: number of seeds that a forward of all earlier stages draws from each generator, by its `id`.
        regularized: variables whose regularizers count here, by `id`: the first of several stages adds them.
    """

    model: keras.Model
    used: list[keras.Variable]
    changed: list[keras.Variable]
    drawn: Mapping[int, int]
    regularized: frozenset[int]

    @property
    def trained(self) -> list[keras.Variable]:
        """Its trainable variables."""
        return [variable for variable in self.used if variable.trainable]

    def losses(self) -> list[tf.Tensor]:
        """Return the losses that the model's last call added, and those of its regularizers."""
        weights = self._regularized_weights
        terms = self.model.losses
        added = len(terms) - len(weights)  # Keras lists those of regularizers last
        pairs = zip(terms[added:], weights, strict=True)
        return terms[:added] + [term for term, weight in pairs if id(weight) in self.regularized]

    def penalty(self) -> float:
        """Return the sum of the regularizers that count here, for the present weights."""
        weights = [weight for weight in self._regularized_weights if id(weight) in self.regularized]
        return sum(float(weight.regularizer(weight)) for weight in weights)

    @property
    def _regularized_weights(self) -> list[keras.Variable]:
        return [weight for weight in self.model.trainable_weights if weight.regularizer is not None]


def build(whole: keras.Model, stages: Sequence[Sequence[ModelBlock]], micro_batch: int) -> list[Part]:
    """Build the parts of a model from the blocks of its stages, for `micro_batch` examples."""
    parts, drawn, seen = [], dict[int, int](), set[int]()
    for number, blocks in enumerate(stages):
        model = stage_model(blocks, number)
        before, (read, changed, graph) = dict(drawn), _observe(model, micro_batch, drawn)
        for name in layer_state.assigned(layer_state.tensorflow_variables(model), graph):
            raise UsageError(
                f"--strategy pipeline: a forward assigns {name}, a tf.Variable; make it with "
                "add_weight(trainable=False)"
            )
        stage_ids = {id(variable) for variable in model.variables}
        used, assigned = (
            [variable for variable in whole.variables if id(variable) in ids] for ids in (read | stage_ids, changed)
        )
        parts.append(Part(model, used, assigned, before, frozenset(stage_ids - seen)))
        seen |= stage_ids
    return parts


def check(parts: Sequence[Part], *, remat: bool, asynchronous: bool, pipelines: int) -> None:
    """Check that training in stages gives the results of one device."""
    changed = [variable for part in parts for variable in part.changed]
    if changed and remat:
        raise UsageError(
            f"--remat: a forward changes {changed[0].path!r}, and would change it twice for each micro-batch; leave "
            "--remat out"
        )
    if changed and pipelines > 1:
        raise UsageError(
            f"--workers for {pipelines} pipelines: a forward changes {changed[0].path!r}, which would differ between "
            "them; use one pipeline"
        )
    for variable, numbers in shared(parts):
        layers = " and ".join(repr(_user(parts[number].model, variable)) for number in numbers)
        if any(variable is other for other in changed):
            raise UsageError(
                f"--strategy pipeline: a forward changes {variable.path!r}, which {layers} use in different stages; "
                "use --cut to keep them in one stage"
            )
        if variable.trainable and asynchronous:
            raise UsageError(
                f"--schedule pipedream: {layers} use {variable.path!r} in different stages, and no stage waits for "
                "another's gradient; use --schedule 1f1b"
            )


def shared(parts: Sequence[Part]) -> list[tuple[keras.Variable, list[int]]]:
    """Return the variables that several stages use, and the numbers of those stages."""
    users: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for variable in part.used:
            users.setdefault(id(variable), []).append(number)
    used = {id(variable): variable for part in parts for variable in part.used}
    return [(used[key], numbers) for key, numbers in users.items() if len(numbers) > 1]


class _Reads(keras.StatelessScope):
    """Records which variables are read and assigned, and reads variables without a value as zeros."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read.add(id(variable))
        if (assigned := super().get_current_value(variable)) is not None:
            return assigned
        return tf.zeros(variable.shape, variable.dtype) if variable._value is None else None


def _observe(model: keras.Model, micro_batch: int, drawn: dict[int, int]) -> tuple[set[int], set[int], Any]:
    """Call a model in a graph, count its draws, and return the ids of variables it reads and assigns, and the graph."""
    graph = tf.__internal__.FuncGraph("observed")
    with graph.as_default(), _Reads() as scope:
        zero = tf.zeros([], tf.int64)
        with placed_seeds.random_place(zero, zero, zero, drawn) as place:
            model(tf.zeros([micro_batch, *model.inputs[0].shape[1:]], model.inputs[0].dtype), training=True)
        drawn |= place.drawn
    return scope.read, set(scope.state_mapping), graph


def _user(model: keras.Model, variable: keras.Variable) -> str:
    """Return the name of the first layer of a stage that uses a variable."""
    for layer in model.layers:
        if any(variable is other for other in layer.variables):
            return str(layer.name)
    return str(model.name)
