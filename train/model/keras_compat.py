"""Fixes for Keras 3 under tf.distribute. Each has a test that fails without it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer  # has no public name
from tensorflow.python.distribute.ps_values import AggregatingVariable  # neither has this

from train.keras3 import fit, replicas
from train.model.layer_state import is_separate, variables_of


@dataclass
class Place:
    """Where in the training random numbers are drawn: they follow from it alone."""

    step: tf.Tensor
    replica: tf.Tensor
    micro_batch: tf.Tensor | None = None
    drawn: dict[int, int] = field(default_factory=dict)
    """How many seeds each generator has given, by its `id`."""


_DRAWS = 2**44
"""More than the numbers of all draws of all generators, whose own seeds have 32 bits."""

_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


def install() -> None:
    """Patch Keras's classes. Call before a model is built. Idempotent."""
    keras.Variable.assign_add = _assign_add
    keras.Variable.assign_sub = _assign_sub
    keras.random.SeedGenerator.next = _next_seed
    TFOptimizer._distributed_tf_update_step = _update
    fit.apply()
    replicas.separate_losses()


_keras_assign_add = keras.Variable.assign_add
_keras_assign_sub = keras.Variable.assign_sub


def _assign_add(variable: keras.Variable, value: object) -> object:
    """Add in one operation.

    Keras reads, adds and writes: that loses updates where several tasks count at once, and where replicas share one
    variable (CentralStorageStrategy) each of them writes the old value again on top of the others'.
    """
    if is_separate(variable):
        return _keras_assign_add(variable, value)
    own = _own(variable)
    return own.assign_add(tf.cast(value, own.dtype))


def _assign_sub(variable: keras.Variable, value: object) -> object:
    if is_separate(variable):
        return _keras_assign_sub(variable, value)
    own = _own(variable)
    return own.assign_sub(tf.cast(value, own.dtype))


_keras_update = TFOptimizer._distributed_tf_update_step


def _update(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    pairs: Sequence[tuple[Any, tf.Variable]],
    learning_rate: Any,
) -> None:
    """Update variables by gradients that are summed already.

    An embedding's gradient names a row as often as the batch has it. Keras hands that to the optimizer, and Adam then
    adds up the squares of a row's parts instead of squaring their sum: its steps come out several times too large, and
    depend on how a batch is cut.
    """

    def update(variable: tf.Variable, gradient: Any, learning_rate: Any) -> Any:
        return optimizer.update_step(tf.convert_to_tensor(gradient), variable, learning_rate)

    for gradient, variable in pairs:
        strategy.extended.update(variable, update, args=(gradient, learning_rate), group=False)


def _own(variable: keras.Variable) -> tf.Variable:
    """Return TensorFlow's variable: `value` is a copy of it in a layer that computes in less than float32."""
    return variable._value


@contextlib.contextmanager
def random_place(
    step: tf.Tensor, replica: tf.Tensor, micro_batch: tf.Tensor | None = None, drawn: Mapping[int, int] | None = None
) -> Iterator[Place]:
    """Draw random numbers of the layers called inside from (seed, step, replica, micro-batch), without state.

    Keras's own generators count their calls in a variable that all replicas share: every replica then drops the same
    units. Drawn from the place, masks differ on every replica and come out the same again after a resume.

    Args:
        step: int64 scalar, optimizer steps done before this one.
        replica: int64 scalar.
        micro_batch: int64 scalar, the number of one of several; None: as number 0.
        drawn: how many seeds the stages before have drawn from each generator, by its `id`; None: none.
    """
    inside = Place(step, replica, micro_batch, dict(drawn or {}))
    token = _place.set(inside)
    try:
        yield inside
    finally:
        _place.reset(token)


_next_state = keras.random.SeedGenerator.next


def _next_seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    """Return a seed `[2] uint32` for one draw."""
    place = _place.get()
    if place is None:
        return _next_state(generator, ordered)
    # The state's first word is the generator's own seed, and never changes.
    return draw_seed(place, generator, tf.cast(generator.state.value[0], tf.int64))


def place() -> Place | None:
    """Return where in the training random numbers are drawn at present; None outside of `random_place`."""
    return _place.get()


def draw_seed(place: Place, generator: object, own: tf.Tensor) -> tf.Tensor:
    """Return a seed `[2] uint32` for the next draw of a generator in a place.

    Args:
        place: where it draws.
        generator: which draws, of either Keras.
        own: the generator's own seed, int64 scalar.
    """
    call = place.drawn.get(id(generator), 0)
    place.drawn[id(generator)] = call + 1
    draw = own * 1009 + call
    if place.micro_batch is not None:
        draw += place.micro_batch * _DRAWS
    key = tf.stack([draw, place.step * 65_537 + place.replica])
    return tf.random.stateless_uniform([2], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox")


def nan_if_broken(loss: tf.Tensor, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> tf.Tensor:
    """Return the loss; NaN where a gradient is not finite.

    oneDNN's ReLU and max-pooling make numbers of NaN, so that the loss of broken weights can look sound.
    """
    parts = [part.values if isinstance(part, tf.IndexedSlices) else part for part in gradients if part is not None]
    if not parts:
        return loss
    total = tf.add_n([tf.cast(tf.reduce_sum(part), tf.float32) for part in parts])
    return tf.where(tf.math.is_finite(total), loss, tf.constant(float("nan"), loss.dtype))


def take_summed_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Stop an optimizer from summing gradients over replicas: they are summed already. Idempotent.

    Keras 3 adds them up itself, which for R replicas would give R times each; divided by R first, some bits are lost.
    tf_keras has an argument for it.
    """
    optimizer._all_reduce_sum_gradients = list  # pairs of gradient and variable


@contextlib.contextmanager
def fixed_rate(optimizer: keras.optimizers.Optimizer, rate: tf.Tensor) -> Iterator[None]:
    """Give an optimizer a learning rate inside, instead of that which follows from its count of updates."""
    optimizer._get_current_learning_rate = lambda: rate
    try:
        yield
    finally:
        del optimizer._get_current_learning_rate


def average_what_changes(optimizer: keras.optimizers.Optimizer) -> None:
    """Have an optimizer's averages follow the weights that an update changes, not all that it was built for."""
    apply, changed = optimizer._backend_apply_gradients, list[keras.Variable]()

    def apply_gradients(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        changed[:] = variables
        apply(gradients, variables)

    def average(_all: list[keras.Variable]) -> None:
        averages = optimizer._model_variables_moving_average
        of_changed = SimpleNamespace(
            use_ema=True,
            iterations=optimizer.iterations,
            ema_momentum=optimizer.ema_momentum,
            _model_variables_moving_average=[averages[optimizer._get_variable_index(each)] for each in changed],
        )
        type(optimizer)._update_model_variables_moving_average(of_changed, changed)

    optimizer._backend_apply_gradients = apply_gradients
    optimizer._update_model_variables_moving_average = average


def synchronize_batch_normalization(model: keras.Model, replicas: int) -> int:
    """Normalise over the global batch in every BatchNormalization layer; return how many were changed.

    Each replica would otherwise normalise its own part of the data.
    """
    if replicas == 1:
        return 0
    changed = 0
    for layer in model._flatten_layers():  # also those inside of other layers, which no public property lists
        if isinstance(layer, tf.keras.layers.BatchNormalization):  # of the Keras in use
            changed += not layer.synchronized
            layer.synchronized = True
    return changed


def let_replicas_assign(model: keras.Model) -> None:
    """Let replicas assign a model's variables under CentralStorageStrategy, as constraints and layers do.

    Without an aggregation it refuses. What replicas assign is the same on all of them.
    """
    kinds = tf.VariableAggregation
    for variable in model.variables:
        own = getattr(variable, "_value", None)
        if isinstance(own, AggregatingVariable) and own._aggregation == kinds.NONE:
            own._aggregation = kinds.ONLY_FIRST_REPLICA


def aggregate_state(model: keras.Model) -> None:
    """Aggregate what layers assign in Keras's own `train_step`, as `LayerState` does in ours: at each assignment."""
    let_replicas_assign(model)
    for variable in variables_of(model):
        replicas.aggregate(variable)
