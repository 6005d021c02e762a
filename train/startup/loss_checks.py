"""Checks of a run's loss and metrics before the run starts.

They must take labels and outputs as the loops pass them, and return values whose mean a step can compute.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.system.errors import ClusterError, UsageError
from cluster.system.messages import described
from cluster.system.terminal import warn
from train import named
from train.config import TrainConfig
from train.data.batches import BatchSlice
from train.data.sources import Source
from train.model import masks
from train.model.objectives import Averaged, Objective
from train.named import Named

EXAMPLES = 2
"""Size of the batch for checks of shapes."""


@dataclass(frozen=True)
class _Specs:
    """Specs of what a loss compares in a batch of `EXAMPLES`; of the masks of outputs, None for none."""

    labels: Named
    outputs: Named
    masks: list[Any]

    def trace(self, function: Callable[..., Any], examples: int = EXAMPLES) -> Any:
        """Trace a function of labels and outputs, to which their masks are attached."""

        def masked(labels: Named, outputs: Named, output_masks: list[Any]) -> Any:
            for output, mask in zip(tf.nest.flatten(outputs), output_masks, strict=True):
                if mask is not None:
                    output._keras_mask = mask
            return function(labels, outputs)

        specs = _each_spec(
            lambda spec: tf.TensorSpec([examples, *spec.shape[1:]], spec.dtype), [self.labels, self.outputs, self.masks]
        )
        return tf.function(masked, autograph=False).get_concrete_function(*specs)

    def __str__(self) -> str:
        return f"labels {_described(self.labels)} and outputs {_described(self.outputs, dtype=False)}"


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
    specs = _Specs(
        source.train_dataset(BatchSlice(EXAMPLES, seed=0)).element_spec.labels,
        _each_spec(lambda output: tf.TensorSpec([EXAMPLES, *output.shape[1:]], "float32"), outputs),
        _each_spec(lambda mask: tf.TensorSpec([EXAMPLES, *mask.shape[1:]], tf.bool), output_masks),
    )
    graph = _check_function(f"--loss {config.loss!r}", specs, objective.loss)
    if num_parts > 1 and _depends_on_others(specs, objective.loss):
        warn(
            f"--loss {config.loss!r}: the loss of an example depends on the others of its batch, and each of the "
            f"{num_parts} replicas, micro-batches or virtual shards sees only a part of that; a larger --global-batch "
            "makes the parts larger"
        )
    _check_masks(config, objective, specs, strategy=strategy)
    masks_by_head = tf.nest.pack_sequence_as(specs.outputs, specs.masks)
    for head, one in objective.heads.items():
        of_head = _Specs(specs.labels[head], specs.outputs[head], [masks_by_head[head]])
        _check_positions(f"--loss {config.loss!r}: {head}", of_head, one.loss)
    for name, metric in objective.metrics.items():
        _check_function(f"--metrics {config.metrics!r}: {name}", specs, metric)
    return graph


def _each_spec(function: Callable[[Any], Any], specs: Any) -> Any:
    """Apply a function to each tensor or spec of a structure; None stays None."""
    return tf.nest.map_structure(lambda spec: None if spec is None else function(spec), specs)


def _traced(where: str, specs: _Specs, function: Callable[..., Any], examples: int = EXAMPLES) -> Any:
    try:
        return specs.trace(function, examples)
    except ClusterError:
        raise
    except BaseException as error:
        raise UsageError(f"{where} fails on {specs}: {described(error)[-300:]}") from None


def _check_function(where: str, specs: _Specs, function: Callable[..., Any]) -> tf.Graph:
    concrete = _traced(where, specs, function)
    losses = concrete.structured_outputs
    shape = getattr(losses, "shape", None)
    if shape is None or not shape.is_compatible_with([EXAMPLES]):
        returned = type(losses).__name__ if shape is None else f"shape {shape}"
        raise UsageError(
            f"{where} returns {returned} for {EXAMPLES} examples; expected ({EXAMPLES},), a value for each"
        )
    _check_positions(where, specs, function)
    return concrete.graph


def _check_masks(config: TrainConfig, objective: Objective, specs: _Specs, *, strategy: str) -> None:
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

    specs.trace(trace)


def _check_positions(where: str, specs: _Specs, function: Callable[..., Any]) -> None:
    """Check that a function does not compare the labels of each example with the outputs of all."""
    if not isinstance(function, Averaged):
        return
    few, more = (_traced(where, specs, function.values, EXAMPLES + at).structured_outputs.shape for at in range(2))
    if not more[:1].is_compatible_with([EXAMPLES + 1]):  # as many as examples above by chance, such as of two classes
        raise UsageError(f"{where} returns {more} for {EXAMPLES + 1} examples; expected a value for each")
    if few[1:] != more[1:] or _averages_pairs(specs, function):
        raise UsageError(
            f"{where} compares all pairs of examples, as {specs} broadcast; give both the same number of axes, such as "
            "by labels[:, None]"
        )


def _averages_pairs(specs: _Specs, function: Callable[..., Any]) -> bool:
    """Whether examples depend on each other, but no longer once what is `[B]` is given as `[B, 1]`.

    False if all is `[B]`, which does not broadcast: a loss may compare examples, as by a softmax over the batch.
    """
    if all(spec.shape.rank == 1 for spec in tf.nest.flatten([specs.labels, specs.outputs])):
        return False

    def as_column(spec: tf.TensorSpec) -> tf.TensorSpec:
        return tf.TensorSpec([EXAMPLES, *(spec.shape[1:].as_list() or [1])], spec.dtype)

    columns = _Specs(_each_spec(as_column, specs.labels), _each_spec(as_column, specs.outputs), specs.masks)
    return bool(_depends_on_others(specs, function)) and _depends_on_others(columns, function) is False


def _depends_on_others(specs: _Specs, loss: Callable[..., Any]) -> bool | None:
    """Whether the loss of an example depends on the other examples of a batch, tested with numbers; None: unknown."""
    random = np.random.default_rng(0)

    def drawn(spec: Any, lowest: float) -> Any:
        size = [3, *spec.shape[1:]]
        values = random.uniform(lowest, 1, size) if spec.dtype.is_floating else np.indices(size).sum(0) % 2
        return tf.constant(values, spec.dtype)

    def first(three: Any, *places: int) -> float:
        """Return the loss of the first of some of the examples."""
        return float(loss(*_each_spec(lambda all_3: tf.gather(all_3, places), three))[0])

    for lowest in (-1.0, 0.1):  # it may accept only some numbers, such as those that have a logarithm
        with contextlib.suppress(BaseException):
            three = _each_spec(functools.partial(drawn, lowest=lowest), [specs.labels, specs.outputs])
            one, other = first(three, 0, 1), first(three, 0, 2)
            if math.isfinite(one):
                return not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
    return None


def _described(specs: Named, *, dtype: bool = True) -> str:
    descriptions = [
        f"{which.strip()} {spec.dtype.name if dtype else ''} [{', '.join(['B', *map(str, spec.shape[1:])])}]"
        for which, item in named.in_words(specs).items()
        for spec in (item if isinstance(item, list | tuple) else [item])
    ]
    return " ".join(", ".join(descriptions).split())
