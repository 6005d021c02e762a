"""Builds a run's model on the machine that starts it, before the run starts.

    python -m train.startup.preflight --config JSON --strategy NAME --data-dir DIR            checks model and loss
    python -m train.startup.preflight --config JSON --strategy NAME --data-dir DIR --memory   counts the model's memory

The checks are only for configurations with a user's parts, because they import TensorFlow. The result goes to the file
that `cluster/contract/user_code.py` names.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.contract import user_code
from cluster.contract.compatibility import precision_of
from cluster.contract.run import records
from cluster.system.errors import ClusterError, UsageError
from cluster.system.messages import described
from train import named
from train.config import TrainConfig
from train.named import Named
from train.startup import preload

if TYPE_CHECKING:
    import keras

    from train.data.sources import Source

EXAMPLES = 2
"""Size of the batch for checks of shapes."""
WITHOUT_ACTIVATION = ("InputLayer", "Flatten", "Reshape", "Dropout")
"""Layers whose outputs share the memory of their inputs, or take none without training."""


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.startup.preflight", description="Tries a run's model and loss."
    )
    parser.add_argument("--config", type=json.loads, required=True, help="the run's configuration as JSON")
    parser.add_argument("--strategy", required=True, help="a key of cluster.strategies.STRATEGIES")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=0, help="number of stages (default: not cut)")
    parser.add_argument("--pipelines", type=int, default=1, help="number of pipelines (default: %(default)s)")
    parser.add_argument("--memory-bytes", type=int, help="memory of each stage (default: no limit)")
    parser.add_argument("--record", type=Path, help="the stages of an earlier generation of the run")
    parser.add_argument("--data-dir", type=Path, required=True, help="prepared data")
    parser.add_argument("--memory", action="store_true", help="only count the model's memory")
    options = parser.parse_args(arguments)
    config = TrainConfig.from_json(options.config)
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    preload.set_variables(config, options.strategy)
    if options.memory:
        return user_code.reply(lambda: measure(config, options.strategy, options.data_dir))
    return user_code.reply(lambda: check(config, options))


def check(config: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Check that the model takes the data's features, and the loss the data's labels and the model's outputs.

    Returns:
        The stages of the model, see `train.pipeline.cut.describe`; empty if it is not cut.

    Raises:
        UsageError: a part is wrong, or the model cannot be cut like that.
    """
    import tensorflow as tf

    from train.data import sources
    from train.loops import fit
    from train.model import masks, models, objectives, optimizers

    source = sources.find(config, options.data_dir)

    def new_model() -> keras.Model:
        return models.of(config, source.feature_shape, source.num_outputs)

    stages: dict[str, Any] = {}
    parts = max(options.replicas * config.micro_batches, config.bitwise_elastic)
    if options.stages:
        model, stages = _stages(new_model, config, options, source.feature_shape)
    else:
        model = new_model()
        optimizers.check_replicas(optimizers.build_for(config, model), config.optimizer.name, options.replicas)
        _check_state(model, source.feature_shape, parts, config)
        if config.loop == "fit" and config.micro_batches > 1:
            fit.check_micro_batches(model, options.replicas, config.micro_batches)
        if config.loop == "fit" and not config.needs_tf_keras(options.strategy):
            fit.check_optimizers(model, options.replicas)
    _check_model(config, model, source, cut=bool(options.stages))
    outputs = models.call(model, source.feature_shape)
    shapes = source.label_shape, models.output_shapes(outputs)
    objectives.check_outputs(config, source.num_outputs, shapes)
    objective = objectives.of(config, classifies=source.classifies, shapes=lambda: shapes)
    if options.stages and objectives.DATA_LOSS in objective.score_name:  # not even the last stage knows the shapes
        raise UsageError(
            f"--strategy pipeline: no score compares the outputs of --model {config.model!r} with the labels"
        )
    output_masks = [masks.of(output) for output in tf.nest.flatten(outputs)]
    if config.needs_tf_keras(options.strategy) and any(mask is not None for mask in output_masks):
        raise UsageError(
            f"--loop fit under parameter servers with a mask of --model {config.model!r}; use --loop custom"
        )
    mask_specs = [_spec(mask, tf.bool) for mask in output_masks]
    labels, outputs = _label_spec(source), tf.nest.map_structure(_spec, outputs)
    specs = labels, outputs, mask_specs
    _check_function(f"--loss {config.loss!r}", *specs, objective.loss)
    if parts > 1 and _depends_on_others(labels, outputs, objective.loss):
        print(
            f"warning: --loss {config.loss!r}: the loss of an example depends on the others of its batch, and each of "
            f"the {parts} replicas, micro-batches or virtual shards has a part of that",
            file=sys.stderr,
        )
    for head, one in objective.heads.items():
        _check_positions(f"--loss {config.loss!r}: {head}", labels[head], outputs[head], one.loss)
    for name, metric in objective.metrics.items():
        _check_function(f"--metrics {config.metrics!r}: {name}", *specs, metric)
    return stages


def _stages(
    new_model: Callable[[], keras.Model], config: TrainConfig, options: argparse.Namespace, feature_shape: Named
) -> tuple[keras.Model, dict[str, Any]]:
    """Build the model without values, and describe its stages, under the conditions of the tasks."""
    import tensorflow as tf

    from train import patches
    from train.pipeline.cut import describe
    from train.pipeline.model_blocks import with_shape
    from train.pipeline.stage_variables import without_values
    from train.strategy import policy

    patches.apply()
    tf.config.threading.set_intra_op_parallelism_threads(config.threads)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    with policy(precision_of(options.strategy, config.precision)):
        model, _ = without_values(new_model)
    record = records.read(options.record, records.Stages.from_json, None) if options.record else None
    return model, describe(
        with_shape(model, feature_shape),
        config,
        options.stages,
        pipelines=options.pipelines,
        memory_bytes=options.memory_bytes,
        record=record,
    )


def _check_model(config: TrainConfig, model: keras.Model, source: Source, *, cut: bool) -> None:
    """Check that a model takes the data, and gives what its loss takes; `cut`: its variables have no values."""
    _check_ranges(config, model, source)
    _check_logits(config, model, source.feature_shape, cut=cut)
    if getattr(model, "compiled", False):
        print(
            f"warning: --model {config.model!r} is compiled, which has no effect: name optimizer, loss and metrics by "
            "--optimizer.name, --loss and --metrics",
            file=sys.stderr,
        )


def _check_ranges(config: TrainConfig, model: keras.Model, source: Source) -> None:
    """Check that the types of a model's inputs can represent the data's whole numbers."""
    import numpy as np
    import tensorflow as tf

    from train.model import input_types

    if source.arrays is None:
        return
    files = source.arrays.train.features
    types = input_types.dtypes(model, files)
    for which, (file, dtype) in named.in_words(named.each(lambda *both: both, files, types)).items():
        if not file.dtype.startswith("int") or (dtype == "float32" and getattr(model, "inputs", None)):
            continue  # Keras also rounds for a float input
        most = 2**24 if dtype == "float32" else tf.as_dtype(dtype).max
        least = -most if dtype == "float32" else tf.as_dtype(dtype).min
        values = np.memmap(file.path, file.dtype, "r")
        if wrong := [value for value in (int(values.min()), int(values.max())) if not least <= value <= most]:
            raise UsageError(
                f"--model {config.model!r} takes features{which} as {dtype}, which cannot hold {wrong[0]}; declare "
                "keras.Input(..., dtype='int64')"
            )


def _check_logits(config: TrainConfig, model: keras.Model, feature_shape: Named, *, cut: bool) -> None:
    """Check that the outputs for a cross entropy of logits are not probabilities; `cut`: variables have no values."""
    import tensorflow as tf

    from train.pipeline.cut import Reads
    from train.settings import heads

    losses, logits = heads.losses(config.loss), "sparse_categorical_crossentropy"
    if ":" not in config.model or logits not in losses.values():
        return

    def forward(features: Named) -> Any:
        with Reads() if cut else contextlib.nullcontext():
            return model(features, training=False)

    specs = _feature_specs(model, feature_shape)
    outputs = tf.function(forward, autograph=False).get_concrete_function(specs).structured_outputs
    for head, output in outputs.items() if isinstance(outputs, Mapping) else [("", outputs)]:
        made = getattr(output, "op", None) if losses.get(head, losses.get("")) == logits else None
        while made is not None and made.type in ("Identity", "Cast", "Reshape", "Squeeze"):
            made = made.inputs[0].op
        if made is not None and made.type in ("Softmax", "Sigmoid"):
            which = f" {head!r}" if head else ""
            raise UsageError(
                f"--model {config.model!r}: the outputs{which} are those of a {made.type.lower()}, and --loss {logits} "
                "takes logits; leave that activation out"
            )


def _check_state(model: keras.Model, feature_shape: Named, parts: int, config: TrainConfig) -> None:
    """Check that layers' state can be combined in a step of several parts, or of virtual shards."""
    import tensorflow as tf

    from train.model import layer_state

    state, weights = layer_state.LayerState(model, parts), model.trainable_variables if config.bitwise_elastic else []
    own = layer_state.tensorflow_variables(model) if parts > 1 else {}

    def forward(features: Named) -> None:
        with state.part(weights, [tf.convert_to_tensor(variable.value) for variable in weights]):
            model(features, training=True)

    if not (state.variables or weights or own):
        return
    graph = tf.function(forward, autograph=False).get_concrete_function(_feature_specs(model, feature_shape)).graph
    in_parts = config.micro_batches > 1 or config.bitwise_elastic > 0
    for where, variable in layer_state.assigned(own, graph).items():
        if in_parts or variable.aggregation == tf.VariableAggregation.NONE:
            raise UsageError(
                f"--model {config.model!r}: {where} is a tf.Variable, which each replica or micro-batch would assign "
                "by itself; make it with add_weight(trainable=False)"
            )


def _feature_specs(model: keras.Model, feature_shape: Named) -> Named:
    """Return the specs of a model's features for a batch of `EXAMPLES`."""
    import tensorflow as tf

    from train.model import input_types

    def spec(shape: tuple[int, ...], dtype: str) -> Any:
        return tf.TensorSpec([EXAMPLES, *shape], dtype)

    return named.each(spec, feature_shape, input_types.dtypes(model, feature_shape))


def _spec(tensor: Any, dtype: Any = "float32") -> Any:
    """Return the spec of a symbolic tensor for a batch of `EXAMPLES`; None for None."""
    import tensorflow as tf

    return None if tensor is None else tf.TensorSpec([EXAMPLES, *tensor.shape[1:]], dtype)


def _check_function(
    where: str, labels: Named, outputs: Named, output_masks: list[Any], function: Callable[..., Any]
) -> None:
    """Check that a loss or a metric takes labels and outputs with masks, and returns a value for each example."""
    import tensorflow as tf

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


def _check_positions(where: str, labels: Named, outputs: Named, function: Callable[..., Any]) -> None:
    """Check that a function does not compare the labels of each example with the outputs of all."""
    import tensorflow as tf

    from train.model.objectives import Averaged

    if not isinstance(function, Averaged):
        return

    def shape(examples: int) -> Any:
        specs = tf.nest.map_structure(
            lambda spec: None if spec is None else tf.TensorSpec([examples, *spec.shape[1:]], spec.dtype), both
        )
        return tf.function(function.values).get_concrete_function(*specs).structured_outputs.shape

    both = [labels, outputs]
    if (few := shape(EXAMPLES))[1:] != shape(EXAMPLES + 1)[1:]:
        raise UsageError(
            f"{where} returns {few} for {EXAMPLES} examples, as {_compared(labels, outputs)} broadcast to all pairs of "
            "examples; give both the same shape, such as by labels[:, None]"
        )


def _depends_on_others(labels: Named, outputs: Named, loss: Callable[..., Any]) -> bool:
    """Whether the loss of an example is another one next to another example, tried on random numbers."""
    import numpy as np
    import tensorflow as tf

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


def _label_spec(source: Source) -> Named:
    from train.data.batches import BatchSlice

    return source.train_dataset(BatchSlice(EXAMPLES, seed=0, num_steps=1)).element_spec.labels


def measure(config: TrainConfig, strategy: str, data_dir: Path) -> dict[str, Any]:
    """Return the model's sizes.

    Returns:
        `parameters`; `weights_bytes`; `gradients_bytes` of the trainable weights; `optimizer_bytes` of its state;
        `activation_bytes` of one example: the outputs of all layers, which the backward needs, or None if they are
        unknown.

    Raises:
        UsageError: the model or its data is wrong.
    """
    from train.data import sources
    from train.model import models, optimizers
    from train.strategy import policy

    source = sources.find(config, data_dir)
    with policy(precision_of(strategy, config.precision)):
        model = models.of(config, source.feature_shape, source.num_outputs)
        optimizer = optimizers.build(config)
        optimizer.build(model.trainable_variables)
    state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return {
        "parameters": sum(math.prod(weight.shape) for weight in model.weights),
        "weights_bytes": _bytes(model.weights),
        "gradients_bytes": _bytes(model.trainable_variables),
        "optimizer_bytes": _bytes(state),
        "activation_bytes": _activation_bytes(model),
    }


def _bytes(variables: Any) -> int:
    import tensorflow as tf

    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def _activation_bytes(model: Any) -> int | None:
    """Return the bytes of all layers' outputs for one example."""
    import tensorflow as tf

    total = 0
    for layer in model.layers:
        if type(layer).__name__ in WITHOUT_ACTIVATION:
            continue
        try:
            outputs = tf.nest.flatten(layer.output)
            sizes = [math.prod(int(size) for size in output.shape[1:]) for output in outputs]
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
        total += sum(size * tf.as_dtype(layer.compute_dtype).size for size in sizes)
    return total


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without TensorFlow's teardown, which can wait for the user's threads
