"""Checks of a run's loss and metrics before the run starts: that they take labels and outputs as the loops do."""

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
    config: TrainConfig, objective: Objective, source: Source, outputs: Any, *, strategy: str, parts: int
) -> tf.Graph:
    """Check that the loss and the metrics take labels and outputs, and return a value for each example.

    Returns the graph of the loss.

    Args:
        outputs: symbolic outputs of the model.
        parts: number of parts of a global batch: replicas, micro-batches or virtual shards.
    """
    output_masks = [masks.mask_of(output) for output in tf.nest.flatten(outputs)]
    if config.needs_tf_keras(strategy) and any(mask is not None for mask in output_masks):
        raise UsageError(
            f"--loop fit under parameter servers with a mask of --model {config.model!r}; use --loop custom"
        )
    mask_specs = [_spec(mask, tf.bool) for mask in output_masks]
    labels = source.train_dataset(BatchSlice(EXAMPLES, seed=0, num_steps=1)).element_spec.labels
    outputs = tf.nest.map_structure(_spec, outputs)
    graph = _check_function(f"--loss {config.loss!r}", labels, outputs, mask_specs, objective.loss)
    if parts > 1 and _depends_on_others(labels, outputs, objective.loss):
        print(
            f"warning: --loss {config.loss!r}: the loss of an example depends on the others of its batch, and each of "
            f"the {parts} replicas, micro-batches or virtual shards has a part of that",
            file=sys.stderr,
        )
    for head, one in objective.heads.items():
        _check_positions(f"--loss {config.loss!r}: {head}", labels[head], outputs[head], one.loss)
    for name, metric in objective.metrics.items():
        _check_function(f"--metrics {config.metrics!r}: {name}", labels, outputs, mask_specs, metric)
    return graph


def _spec(tensor: Any, dtype: Any = "float32") -> Any:
    """Return the spec of a symbolic tensor for a batch of `EXAMPLES`; None for None."""
    return None if tensor is None else tf.TensorSpec([EXAMPLES, *tensor.shape[1:]], dtype)


def _check_function(
    where: str, labels: Named, outputs: Named, output_masks: list[Any], function: Callable[..., Any]
) -> tf.Graph:

    def masked(labels: Named, outputs: Named, output_masks: list[Any]) -> Any:
        for output, mask in zip(tf.nest.flatten(outputs), output_masks, strict=True):
            if mask is not None:
                output._keras_mask = mask
        return function(labels, outputs)

    try:
        concrete = tf.function(masked, autograph=False).get_concrete_function(labels, outputs, output_masks)
        losses = concrete.structured_outputs
    except ClusterError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where} fails on {_compared(labels, outputs)}: {described(error)[-300:]}") from None
    shape = getattr(losses, "shape", None)
    if shape is None or not shape.is_compatible_with([EXAMPLES]):
        returned = type(losses).__name__ if shape is None else f"shape {shape}"
        raise UsageError(
            f"{where} returns {returned} for {EXAMPLES} examples; expected ({EXAMPLES},), a value for each"
        )
    _check_positions(where, labels, outputs, function)
    return concrete.graph


def _check_positions(where: str, labels: Named, outputs: Named, function: Callable[..., Any]) -> None:
    """Check that a function does not compare the labels of each example with the outputs of all."""
    if not isinstance(function, Averaged):
        return

    def shape(examples: int) -> Any:
        specs = tf.nest.map_structure(
            lambda spec: None if spec is None else tf.TensorSpec([examples, *spec.shape[1:]], spec.dtype),
            [labels, outputs],
        )
        return tf.function(function.values).get_concrete_function(*specs).structured_outputs.shape

    if (few := shape(EXAMPLES))[1:] != shape(EXAMPLES + 1)[1:]:
        raise UsageError(
            f"{where} returns {few} for {EXAMPLES} examples, as {_compared(labels, outputs)} broadcast to all pairs of "
            "examples; give both the same shape, such as by labels[:, None]"
        )


def _depends_on_others(labels: Named, outputs: Named, loss: Callable[..., Any]) -> bool:
    """Whether the loss of an example is another one next to another example, tried on random numbers."""
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
    except (Exception, SystemExit):  # it may take some numbers only
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
