"""Random layers draw from (seed, step, replica, micro-batch) instead of a state.

Defect: Keras's seed generators count their draws in a variable that all replicas share, so every replica drops the same
units. Drawn from the place in the training, masks differ between replicas and are the same again after a resume.
Versions: Keras 3.15.1.
Test: tests/process/train/test_trainer_patches.py::test_keras_itself_drops_the_same_units_on_every_replica
Not applied: outside `random_place`. It stays when Keras draws by replica: Keras does not promise the same masks after a
resume, see docs/internals/decisions/0008-random-layers.md.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from cluster.system.errors import UsageError


@dataclass
class RandomPlace:
    """The place in the training from which random numbers are drawn."""

    step: tf.Tensor
    replica: tf.Tensor
    micro_batch: tf.Tensor | None = None
    drawn: dict[int, int] = field(default_factory=dict)
    """Number of seeds drawn from each generator, by its `id`."""
    graph: tf.Graph = field(default_factory=tf.compat.v1.get_default_graph)
    """The graph in which layers are called."""
    repeats: bool = False
    """Whether a draw was inside a loop, whose iterations would all draw the same."""


_DRAWS = 2**44
"""Exceeds the number of any draw of any generator, whose own seeds have 32 bits."""

_place: contextvars.ContextVar[RandomPlace | None] = contextvars.ContextVar("place", default=None)
_keras_next_seed = keras.random.SeedGenerator.next


_unseeded: list[keras.random.SeedGenerator] = []


def make_unseeded(seed: int) -> None:
    """Create the generator for layers that were given none.

    Keras would make one for each of the threads that call replicas, inside the graph of a step, which fails.
    """
    _unseeded[:] = [keras.random.SeedGenerator(seed)]


@contextlib.contextmanager
def random_place(
    step: tf.Tensor, replica: tf.Tensor, micro_batch: tf.Tensor | None = None, drawn: Mapping[int, int] | None = None
) -> Iterator[RandomPlace]:
    """Set the place from which layers called inside draw their random numbers.

    `step`, the optimizer steps done before this one, `replica` and `micro_batch`, None for number 0, are int64 scalars.
    `drawn` is how many seeds the earlier stages have drawn from each generator, by its `id`.
    """
    if _unseeded:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _unseeded[0])
    inside = RandomPlace(step, replica, micro_batch, dict(drawn or {}))
    token = _place.set(inside)
    try:
        yield inside
    finally:
        _place.reset(token)
    if inside.repeats:  # raised after the model's call, in which Keras extends messages
        raise UsageError(
            "a layer draws random numbers inside a loop, such as Dropout in the cell of an RNN, and would draw the "
            "same ones in each iteration; draw before the loop, as keras.layers.LSTM(dropout=...) does"
        )


def _next_seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    """Return a seed `[2]`, 32 bits each in the type of Keras's seeds, for the next draw of a generator."""
    place = _place.get()
    if place is None:
        return _keras_next_seed(generator, ordered)
    place.repeats |= _is_in_loop(place.graph)
    call = place.drawn.get(id(generator), 0)
    place.drawn[id(generator)] = call + 1
    # The state's first word is the generator's seed and never changes.
    draw = tf.cast(generator.state.value[0], tf.int64) * 1009 + call
    if place.micro_batch is not None:
        draw += place.micro_batch * _DRAWS
    key = tf.stack([draw, place.step * 65_537 + place.replica])
    seed = tf.random.stateless_uniform([2], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox")
    return tf.cast(seed, generator.state.dtype)


def _is_in_loop(outside: tf.Graph) -> bool:
    graph = tf.compat.v1.get_default_graph()
    while graph is not outside and isinstance(graph, tf.__internal__.FuncGraph):
        if type(graph).__name__ == "WhileBodyFuncGraph":  # has no public name
            return True
        graph = graph.outer_graph
    return False


REPLACED: list[Any] = [(keras.random.SeedGenerator, "next", _next_seed, {})]
