"""Masks that reach a model's output: padding counts neither in the loss nor in a score.

Keras divides the sum over unmasked positions by their number in the batch. Here that is the global batch: the sums of a
replica or a micro-batch are divided by the mean number of unmasked positions per example of the global batch. So the
mean over examples is that of Keras on one device, however the padding is distributed over the parts.

Shapes: B examples of a part of the batch, O outputs.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

_positions: contextvars.ContextVar[Callable[[tf.Tensor], Any] | None] = contextvars.ContextVar(
    "positions", default=None
)
_batch: contextvars.ContextVar[tuple[tf.Tensor, int] | None] = contextvars.ContextVar("batch", default=None)
_counting: contextvars.ContextVar[bool] = contextvars.ContextVar("counting", default=False)


def mask_of(output: Any) -> tf.Tensor | None:
    """Return the mask of an output, `[B, ...] bool`; None if it has no mask or is not a tensor."""
    return getattr(output, "_keras_mask", None)


def of_values(values: Any, outputs: Any) -> tf.Tensor | None:
    """Return the mask of values computed from outputs: positions that neither's mask excludes, as in Keras."""
    mask, own = mask_of(outputs), mask_of(values)
    if own is None or own is mask:
        return mask
    return own if mask is None else mask & own


def may_begin_in(model: keras.Model) -> bool:
    """Whether a layer of a model may create a mask. The symbolic outputs of nested models do not show that."""

    def begins_at(layer: keras.layers.Layer) -> bool:
        custom = not type(layer).compute_mask.__module__.startswith(("keras.", "tf_keras."))
        function = isinstance(layer, keras.layers.Lambda) and layer.mask is not None
        return custom or function or isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", False))

    return any(begins_at(layer) for layer in model._flatten_layers())


def average_by_example(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Return the mean of each example's values over its positions, `[B]`; a single value per example is unchanged."""
    rank = values.shape.rank
    if mask is None or (rank == 1 and mask.shape.rank > 1):
        return _over_positions(tf.reduce_mean, values)
    if rank > mask.shape.rank:
        values = tf.reduce_mean(values, axis=list(range(mask.shape.rank, rank)))
    sums_B = _over_positions(tf.reduce_sum, tf.where(mask, values, 0.0))
    if positions := _positions.get():
        return tf.math.divide_no_nan(sums_B, positions(mask))
    # The average number of unmasked positions per example of a step, whose replicas have equal batches.
    counts_1 = sum_counts(tf.math.count_nonzero(mask)[tf.newaxis])
    context = tf.distribute.get_replica_context()
    examples = tf.cast(tf.shape(mask)[0], tf.float32) * (context.num_replicas_in_sync if context else 1)
    return tf.math.divide_no_nan(sums_B, tf.cast(counts_1[0], tf.float32) / examples)


def _over_positions(reduce: Callable[..., tf.Tensor], values: tf.Tensor) -> tf.Tensor:
    rank = values.shape.rank
    return values if rank in (None, 1) else reduce(values, axis=list(range(1, rank)))


def sum_counts(counts_O: tf.Tensor) -> tf.Tensor:
    """Add up counts over all replicas; call it in replica context, outside loops."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return counts_O
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(counts_O))  # results of a loop have no device


def count(outputs: Sequence[Any]) -> tf.Tensor:
    """Return the number of unmasked positions of each output, `[O] int64`; 0 for outputs without a mask."""
    output_masks = [mask_of(output) for output in outputs]
    return tf.stack([tf.zeros([], tf.int64) if mask is None else tf.math.count_nonzero(mask) for mask in output_masks])


def is_counting() -> bool:
    """Whether a step only counts positions."""
    return _counting.get()


def count_only() -> AbstractContextManager[None]:
    """Make a step only count the positions of a part of its batch."""
    return _set(_counting, True)


def of_batch(counts_O: tf.Tensor | None, examples: int) -> AbstractContextManager[None]:
    """Average over a batch whose unmasked positions were counted in all of its parts, or None."""
    return _set(_batch, None if counts_O is None else (counts_O, examples))


def average_over_batch(outputs: Sequence[Any]) -> AbstractContextManager[None]:
    """Average these outputs over the batch of `of_batch`, if there is one."""
    if (batch := _batch.get()) is None:
        return contextlib.nullcontext()
    places = {id(mask_of(output)): place for place, output in enumerate(outputs)}
    return _set(_positions, lambda mask: tf.cast(batch[0][places[id(mask)]], tf.float32) / batch[1])


@contextlib.contextmanager
def sum_only() -> Iterator[list[tf.Tensor]]:
    """Sum instead of averaging; yield a list that receives the masks of the summed values."""
    found: list[tf.Tensor] = []

    def record(mask: tf.Tensor) -> float:
        found.append(mask)
        return 1.0

    with _set(_positions, record):
        yield found


def count_by_example(mask: tf.Tensor) -> tf.Tensor:
    """Return the number of unmasked positions of each example, `[B] float32`."""
    return _over_positions(tf.reduce_sum, tf.cast(mask, tf.float32))


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
