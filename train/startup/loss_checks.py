"""Checks of a run's loss and metrics before the run starts.

They must take labels and outputs as the loops pass them, and return values whose mean a step can compute.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.system.errors import ClusterError, UsageError
from cluster.system.messages import described
from train import named
from train.config import TrainConfig
from train.data.batches import BatchSlice
from train.data.sources import Source
from train.model import masks
from train.model.objectives import Averaged, Objective
from train.named import Named

EXAMPLES = 2
"""Size of the batch for checks of shapes."""


def check_objective(
    config: TrainConfig,
    objective: Objective,
    source: Source,
    outputs: Any,
    output_masks: list[Any],
    *,
    strategy: str,
    num_parts: int,
) -> tf.Graph:
    """Check that the loss and the metrics take labels and outputs, and return a value for each example.

    `outputs` are the model's symbolic ones, and `output_masks` their masks in a call, None for none; a global batch has
    `num_parts` replicas, micro-batches or virtual shards. Returns the graph of the loss.
    """
    if config.needs_tf_keras(strategy) and any(mask is not None for mask in output_masks):
        raise UsageError(
            f"--loop fit under parameter servers with a mask of --model {config.model!r}; use --loop custom"
        )
    mask_specs = [_spec(mask, tf.bool) for mask in output_masks]
    labels = source.train_dataset(BatchSlice(EXAMPLES, seed=0)).element_spec.labels
    outputs = tf.nest.map_structure(_spec, outputs)
    graph = _check_function(f"--loss {config.loss!r}", labels, outputs, mask_specs, objective.loss)
    if num_parts > 1 and _depends_on_others(labels, outputs, objective.loss):
        print(
            f"warning: --loss {config.loss!r}: the loss of an example depends on the others of its batch, and each of "
            f"the {num_parts} replicas, micro-batches or virtual shards sees only a part of that; a larger "
            "--global-batch makes the parts larger",
            file=sys.stderr,
        )
    _check_masks(config, objective, labels, outputs, mask_specs, strategy=strategy)
    masks_by_head = tf.nest.pack_sequence_as(outputs, mask_specs)
    for head, one in objective.heads.items():
        where = f"--loss {config.loss!r}: {head}"
        _check_positions(where, labels[head], outputs[head], [masks_by_head[head]], one.loss)
    for name, metric in objective.metrics.items():
        _check_function(f"--metrics {config.metrics!r}: {name}", labels, outputs, mask_specs, metric)
    return graph


def _spec(tensor: Any, dtype: Any = "float32") -> Any:
    """Return the spec of a symbolic tensor for a batch of `EXAMPLES`; None for None."""
    return None if tensor is None else tf.TensorSpec([EXAMPLES, *tensor.shape[1:]], dtype)


def _check_function(
    where: str, labels: Named, outputs: Named, output_masks: list[Any], function: Callable[..., Any]
) -> tf.Graph:
    try:
        concrete = _with_masks(function).get_concrete_function(labels, outputs, output_masks)
        losses = concrete.structured_outputs
    except ClusterError:
        raise
    except BaseException as error:
        raise UsageError(f"{where} fails on {_compared(labels, outputs)}: {described(error)[-300:]}") from None
    shape = getattr(losses, "shape", None)
    if shape is None or not shape.is_compatible_with([EXAMPLES]):
        returned = type(losses).__name__ if shape is None else f"shape {shape}"
        raise UsageError(
            f"{where} returns {returned} for {EXAMPLES} examples; expected ({EXAMPLES},), a value for each"
        )
    _check_positions(where, labels, outputs, output_masks, function)
    return concrete.graph


def _with_masks(function: Callable[..., Any]) -> Any:
    """Return a `tf.function` of labels, outputs and a list of their masks, which attaches these to the outputs."""

    def masked(labels: Named, outputs: Named, output_masks: list[Any]) -> Any:
        for output, mask in zip(tf.nest.flatten(outputs), output_masks, strict=True):
            if mask is not None:
                output._keras_mask = mask
        return function(labels, outputs)

    return tf.function(masked, autograph=False)


def _check_masks(
    config: TrainConfig, objective: Objective, labels: Named, outputs: Named, output_masks: list[Any], *, strategy: str
) -> None:
    """Check that the loss ignores no mask of the outputs, and adds none whose positions a step cannot count."""

    def trace(labels: Named, outputs: Named) -> None:
        masked = [output for output in tf.nest.flatten(outputs) if masks.mask_of(output) is not None]
        with masks.sum_only() as found, tf.GradientTape() as tape:
            tape.watch(masked)
            losses = objective.loss(labels, outputs)
        gradients = tape.gradient(losses, masked)
        counted = [masks.mask_of(output) for output in [outputs[head] for head in objective.heads] or [outputs]]
        own = [mask for mask in found if all(mask is not one for one in counted)]
        if own and (config.micro_batches > 1 or config.bitwise_elastic or strategy == "pipeline"):
            raise UsageError(
                f"--loss {config.loss!r} returns values with a mask, such as that of ignore_class, whose positions are "
                "not counted over micro-batches, virtual shards or stages; leave out the mask or that option"
            )
        if not found and any(gradient is not None for gradient in gradients):
            raise UsageError(
                f"--loss {config.loss!r} takes several outputs, and returns values without the mask of one of them; "
                "set it, values._keras_mask = outputs[...]._keras_mask, or give each output a loss"
            )

    _with_masks(trace).get_concrete_function(labels, outputs, output_masks)


def _check_positions(
    where: str, labels: Named, outputs: Named, output_masks: list[Any], function: Callable[..., Any]
) -> None:
    """Check that a function does not compare the labels of each example with the outputs of all."""
    if not isinstance(function, Averaged):
        return

    def shape(examples: int) -> Any:
        specs = tf.nest.map_structure(
            lambda spec: None if spec is None else tf.TensorSpec([examples, *spec.shape[1:]], spec.dtype),
            [labels, outputs, output_masks],
        )
        return _with_masks(function.values).get_concrete_function(*specs).structured_outputs.shape

    if (few := shape(EXAMPLES))[1:] != shape(EXAMPLES + 1)[1:]:
        raise UsageError(
            f"{where} returns {few} for {EXAMPLES} examples, as {_compared(labels, outputs)} broadcast to all pairs of "
            "examples; give both the same shape, such as by labels[:, None]"
        )


def _depends_on_others(labels: Named, outputs: Named, loss: Callable[..., Any]) -> bool:
    """Whether the loss of an example depends on the other examples of a batch, tested with random numbers."""
    random = np.random.default_rng(0)

    def drawn(spec: Any) -> Any:
        if spec is None:
            return None
        size = [3, *spec.shape[1:]]
        return tf.constant(
            random.normal(size=size) if spec.dtype.is_floating else random.integers(0, 2, size), spec.dtype
        )

    def first(*places: int) -> float:
        """Return the loss of the first of some of the examples."""
        batch = tf.nest.map_structure(lambda all_3: None if all_3 is None else tf.gather(all_3, places), three)
        return float(loss(*batch)[0])

    three = tf.nest.map_structure(drawn, [labels, outputs])
    try:
        one, other = first(0, 1), first(0, 2)
    except BaseException:  # it may accept only some numbers
        return False
    return math.isfinite(one) and not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)


def _compared(labels: Named, outputs: Named) -> str:
    return f"labels {_described(labels)} and outputs {_described(outputs, dtype=False)}"


def _described(specs: Named, *, dtype: bool = True) -> str:
    descriptions = [
        f"{which.strip()} {spec.dtype.name if dtype else ''} [{', '.join(['B', *map(str, spec.shape[1:])])}]"
        for which, item in named.in_words(specs).items()
        for spec in (item if isinstance(item, list | tuple) else [item])
    ]
    return " ".join(", ".join(descriptions).split())
