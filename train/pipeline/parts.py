"""The model of each stage, and what it uses when it is called: weights of other stages, state, random generators.

Keras knows which layer made a variable, but not which layers read it: an output layer can multiply by the weights of
the embedding. So each stage is traced once, with zeros for variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from cluster.system.errors import UsageError
from train.patches import placed_seeds
from train.pipeline.blocks import ModelBlock, stage_model


@dataclass(frozen=True)
class Part:
    """A stage of a model.

    Attributes:
        model: its layers and variables are those of the whole model.
        used: the variables of the whole model that it has or reads, in the order of the whole model.
        changed: those that it assigns while training, such as the averages of batch normalisation.
        drawn: how many seeds one forward of all stages before it draws from each generator, by the generator's `id`.
    """

    model: keras.Model
    used: list[keras.Variable]
    changed: list[keras.Variable]
    drawn: Mapping[int, int]

    regularised: frozenset[int]
    """The variables whose regularisers count here, by `id`: of stages that share a variable, the first adds it."""

    @property
    def trained(self) -> list[keras.Variable]:
        """The variables that its gradients change."""
        return [variable for variable in self.used if variable.trainable]

    def losses(self) -> list[tf.Tensor]:
        """Return the losses that the model's last call added, and those of its regularisers."""
        variables = [each for each in self.model.trainable_weights if each.regularizer is not None]
        terms = self.model.losses
        added = len(terms) - len(variables)  # Keras lists those of regularisers last
        own = [term for term, one in zip(terms[added:], variables, strict=True) if id(one) in self.regularised]
        return terms[:added] + own


def build(whole: keras.Model, stages: Sequence[Sequence[ModelBlock]], micro_batch: int) -> list[Part]:
    """Return the parts of a model, each from the blocks of a stage.

    Args:
        whole: the model.
        stages: its blocks.
        micro_batch: examples in one.
    """
    parts, drawn, seen = [], dict[int, int](), set[int]()
    for number, blocks in enumerate(stages):
        model = stage_model(blocks, number)
        before, (read, changed) = dict(drawn), _observe(model, micro_batch, drawn)
        own = {id(variable) for variable in model.variables}
        used, assigned = ([each for each in whole.variables if id(each) in ids] for ids in (read | own, changed))
        parts.append(Part(model, used, assigned, before, frozenset(own - seen)))
        seen |= own
    return parts


def check(parts: Sequence[Part], *, remat: bool, asynchronous: bool, pipelines: int) -> None:
    """Check that stages can be trained as requested.

    Raises:
        UsageError: they would not compute what one device does; the message names the variable and the layers.
    """
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
        if any(variable is one for one in changed):
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
    """Notes which variables are read and assigned, and gives those without a value zeros."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read.add(id(variable))
        if (assigned := super().get_current_value(variable)) is not None:
            return assigned
        return tf.zeros(variable.shape, variable.dtype) if variable._value is None else None


def _observe(model: keras.Model, micro_batch: int, drawn: dict[int, int]) -> tuple[set[int], set[int]]:
    """Call a model in a graph of its own; return the ids of the variables it reads and assigns, and count its draws."""
    with tf.__internal__.FuncGraph("observed").as_default(), _Reads() as scope:
        zero = tf.zeros([], tf.int64)
        with placed_seeds.random_place(zero, zero, zero, drawn) as place:
            model(tf.zeros([micro_batch, *model.inputs[0].shape[1:]], model.inputs[0].dtype), training=True)
        drawn |= place.drawn
    return scope.read, set(scope.state_mapping)


def _user(model: keras.Model, variable: keras.Variable) -> str:
    """Return the name of the first layer of a stage that uses a variable."""
    for layer in model.layers:
        if any(variable is one for one in layer.variables):
            return str(layer.name)
    return str(model.name)
