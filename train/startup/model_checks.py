"""Checks of a run's model before the run starts: that it takes the data, and can be trained in parts or in stages."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.contract.compatibility import precision_of
from cluster.system.errors import UsageError
from train import named, patches
from train.config import TrainConfig
from train.data import feeds, sources
from train.data.sources import Source
from train.loops import fit_model
from train.model import input_types, layer_state, models, objectives, optimizers
from train.named import Named
from train.pipeline.model_blocks import ObservingScope, rebuild_with_shape
from train.pipeline.stage_models import describe_partition
from train.pipeline.stage_variables import without_values
from train.settings import heads
from train.startup import loss_checks, primitives
from train.strategy import precision_policy


def check_parts(
    config: TrainConfig,
    *,
    strategy: str,
    data_dir: Path,
    replicas: int = 1,
    batch_divisor: int = 1,
    stages: int = 0,
    pipelines: int = 1,
    memory_bytes: int | None = None,
) -> dict[str, Any]:
    """Check that the model takes the data's features, and the loss the data's labels and the model's outputs.

    Args:
        batch_divisor: number of replicas that share a batch; under parameter servers each worker has its own.
        stages: number of stages; 0 if the model is not cut.
        pipelines: number of pipelines.
        memory_bytes: memory of each stage; None for no limit.

    Returns:
        The stages of the model, see `train.pipeline.stage_models.describe_partition`, if it is cut; as `unverified` the
        operations whose bits may vary with oneDNN's kernels.

    Raises:
        UsageError: a part is wrong, or the model cannot be cut like that.
    """
    source = sources.open_source(config, data_dir)
    if source.arrays is not None:
        shares = batch_divisor
        if config.loop != "fit":
            shares = (config.bitwise_elastic or shares) * config.micro_batches
        feeds.check_sizes(source.train_examples, config.global_batch // shares)

    def new_model() -> keras.Model:
        return models.build_configured(config, source.feature_shape, source.num_outputs)

    described: dict[str, Any] = {}
    parts = max(replicas * config.micro_batches, config.bitwise_elastic)
    if stages:
        model = _build_without_values(new_model, config, strategy)
        shaped = rebuild_with_shape(model, source.feature_shape)
        described = describe_partition(shaped, config, stages, pipelines=pipelines, memory_bytes=memory_bytes)
    else:
        model = new_model()
        optimizers.check_replicas(optimizers.build_for_model(config, model), config.optimizer.name, replicas)
        _check_state(model, source.feature_shape, parts, config)
        if config.loop == "fit" and config.micro_batches > 1:
            fit_model.check_micro_batches(model, replicas, config.micro_batches)
        if config.loop == "fit" and not config.needs_tf_keras(strategy):
            fit_model.check_optimizers(model, replicas)
    _check_ranges(config, model, source)
    if getattr(model, "compiled", False):
        print(
            f"warning: --model {config.model!r} is compiled, which has no effect: name optimizer, loss and metrics by "
            "--optimizer.name, --loss and --metrics",
            file=sys.stderr,
        )
    outputs = models.call_symbolically(model, source.feature_shape)
    shapes = source.label_shape, models.output_shapes(outputs)
    objectives.check_outputs(config, source.num_outputs, shapes)
    objective = objectives.build_configured(config, classifies=source.classifies, shapes=lambda: shapes)
    _check_logits(config, model, source.feature_shape, cut=bool(stages))
    if stages and objectives.DATA_LOSS in objective.score_name:  # not even the last stage knows the shapes
        raise UsageError(
            f"--strategy pipeline: no score compares the outputs of --model {config.model!r} with the labels"
        )
    graph = loss_checks.check_objective(config, objective, source, outputs, strategy=strategy, parts=parts)
    if config.loop == "fit" and (method := models.find_override(model)):
        unverified = [f"the model's {method}"]
    else:
        model_graph = _trace_model(model, source.feature_shape, cut=bool(stages)).graph
        unverified = primitives.find_unverified([model_graph, graph])
    return described | {"unverified": unverified}


def _build_without_values(new_model: Any, config: TrainConfig, strategy: str) -> keras.Model:
    """Build the model without values, under the conditions of the tasks."""
    patches.apply()
    tf.config.threading.set_intra_op_parallelism_threads(config.threads)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    with precision_policy(precision_of(strategy, config.precision)):
        return without_values(new_model)[0]


def _check_ranges(config: TrainConfig, model: keras.Model, source: Source) -> None:
    if source.arrays is None:
        return
    files = source.arrays.train.features
    types = input_types.input_dtypes(model, files)
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
    losses, logits = heads.parse_losses(config.loss), "sparse_categorical_crossentropy"
    if ":" not in config.model or logits not in losses.values():
        return

    outputs = _trace_model(model, feature_shape, cut=cut, training=False).structured_outputs
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
    state, weights = layer_state.LayerState(model, parts), model.trainable_variables if config.bitwise_elastic else []
    unknown = layer_state.tensorflow_variables(model) if parts > 1 else {}

    def forward(features: Named) -> None:
        with state.part(weights, [tf.convert_to_tensor(variable.value) for variable in weights]):
            model(features, training=True)

    if not (state.variables or weights or unknown):
        return
    graph = _trace(forward, model, feature_shape).graph
    in_parts = config.micro_batches > 1 or config.bitwise_elastic > 0
    for where, variable in layer_state.find_assigned(unknown, graph).items():
        if in_parts or variable.aggregation == tf.VariableAggregation.NONE:
            raise UsageError(
                f"--model {config.model!r}: {where} is a tf.Variable, which each replica or micro-batch would assign "
                "by itself; make it with add_weight(trainable=False)"
            )


def _trace_model(model: keras.Model, feature_shape: Named, *, cut: bool, training: bool = True) -> Any:
    def forward(features: Named) -> Any:
        with ObservingScope() if cut else contextlib.nullcontext():
            return model(features, training=training)

    return _trace(forward, model, feature_shape)


def _trace(function: Any, model: keras.Model, feature_shape: Named) -> Any:
    """Trace a function of a model's features for a batch of `EXAMPLES`."""

    def spec(shape: tuple[int, ...], dtype: str) -> tf.TensorSpec:
        return tf.TensorSpec([loss_checks.EXAMPLES, *shape], dtype)

    specs = named.each(spec, feature_shape, input_types.input_dtypes(model, feature_shape))
    return tf.function(function, autograph=False).get_concrete_function(specs)
