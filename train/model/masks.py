"""Masks that reach a model's output: positions that are padding count neither in the loss nor in a score.

Keras divides the sum over the positions that are not masked by their number in the batch. Here that is the global
batch: the values of a replica or a micro-batch are divided by the positions per example, counted over all of them. So
the mean over the examples is that of Keras on one device, however unevenly the parts hold the padding.

Shapes: B examples of a part of the batch, O outputs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

_positions: contextvars.ContextVar[Callable[[tf.Tensor], Any] | None] = contextvars.ContextVar(
    "positions", default=None
)
_batch: contextvars.ContextVar[tuple[tf.Tensor, int] | None] = contextvars.ContextVar("batch", default=None)
_counting: contextvars.ContextVar[bool] = contextvars.ContextVar("counting", default=False)


def of(output: Any) -> tf.Tensor | None:
    """Return the mask of an output, `[B, ...] bool`; None where it has none, or is not a tensor."""
    return getattr(output, "_keras_mask", None)


def begins_at(layer: keras.layers.Layer) -> bool:
    """Whether a layer may make a mask. Symbolic outputs of a model do not tell: a nested model's have none."""
    custom = not type(layer).compute_mask.__module__.startswith(("keras.", "tf_keras."))
    return custom or isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", False))


def keep(output: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Return an output with the mask of the one that it was made of."""
    mask = of(source)
    if mask is not None:
        output._keras_mask = mask
    return output


def by_example(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Return the mean of each example's values over its positions, `[B]`; one value an example is left as it is.

    Args:
        values: `[B, ...]`.
        mask: of the outputs: positions without it are left out, and the others divided by `positions`.
    """
    rank = values.shape.rank
    if mask is None or (rank == 1 and mask.shape.rank > 1):
        return _over_positions(tf.reduce_mean, values)
    if rank > mask.shape.rank:
        values = tf.reduce_mean(values, axis=list(range(mask.shape.rank, rank)))
    sums_B = _over_positions(tf.reduce_sum, tf.where(mask, values, 0.0))
    return tf.math.divide_no_nan(sums_B, (_positions.get() or _of_step)(mask))


def _over_positions(reduce: Callable[..., tf.Tensor], values: tf.Tensor) -> tf.Tensor:
    rank = values.shape.rank
    return values if rank in (None, 1) else reduce(values, axis=list(range(1, rank)))


def _of_step(mask: tf.Tensor) -> tf.Tensor:
    """Return how many positions of an example count on average: in the batch of a step, shared by equal replicas."""
    counts_1 = over_replicas(tf.math.count_nonzero(mask)[tf.newaxis])
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync if context else 1
    return tf.cast(counts_1[0], tf.float32) / (tf.cast(tf.shape(mask)[0], tf.float32) * replicas)


def over_replicas(counts_O: tf.Tensor) -> tf.Tensor:
    """Return counts added up over all replicas; call it in a replica, outside of loops."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return counts_O
    return context.all_reduce(tf.distribute.ReduceOp.SUM, counts_O)


def count(outputs: Sequence[Any]) -> tf.Tensor:
    """Return how many positions of each output count, `[O] int64`; 0 of one without a mask."""
    found = [of(output) for output in outputs]
    return tf.stack([tf.zeros([], tf.int64) if mask is None else tf.math.count_nonzero(mask) for mask in found])


def is_counting() -> bool:
    """Whether only positions are to be counted."""
    return _counting.get()


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Have a step count the positions of a part of its batch, before anything else is computed of it."""
    with _set(_counting, True):
        yield


@contextlib.contextmanager
def of_batch(counts_O: tf.Tensor, examples: int) -> Iterator[None]:
    """Average over a batch of so many examples, whose positions were counted in all of its parts."""
    with _set(_batch, (counts_O, examples)):
        yield


@contextlib.contextmanager
def averaged(outputs: Sequence[Any]) -> Iterator[None]:
    """Average these outputs as `of_batch` says, if it does."""
    batch = _batch.get()
    if batch is None:
        yield
        return
    places = {id(of(output)): place for place, output in enumerate(outputs)}
    with _set(_positions, lambda mask: tf.cast(batch[0][places[id(mask)]], tf.float32) / batch[1]):
        yield


@contextlib.contextmanager
def summed() -> Iterator[list[tf.Tensor]]:
    """Do not average, but yield a list for the numbers of positions that count, `[B] float32`, of what has a mask."""
    counts: list[tf.Tensor] = []

    def note(mask: tf.Tensor) -> float:
        counts.append(_over_positions(tf.reduce_sum, tf.cast(mask, tf.float32)))
        return 1.0

    with _set(_positions, note):
        yield counts


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
