"""Checks of a run's model before the run starts, and of its loss and metrics by `loss_checks.py`.

The model must take the data, and be trainable in parts or in stages.
"""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.contract import strategies
from cluster.contract.compatibility import precision_of
from cluster.system.errors import UsageError
from cluster.system.terminal import warn
from train import named, patches, random_operations
from train.config import TrainConfig
from train.data import feeds, opening
from train.data.sources import Source
from train.model import input_types, layer_state, masks, models, objectives, optimizers
from train.model.export import is_legacy
from train.named import Named
from train.pipeline.model_blocks import ObservingScope, rebuild_with_shape
from train.pipeline.stage_models import describe_partition, without_values
from train.settings import parts
from train.startup import fit_checks, loss_checks, preload, primitives
from train.strategy import precision_policy

COMPUTES = {"bf16": "bfloat16", "fp16": "float16"}


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

    `batch_divisor` is the number of replicas that share a batch: under parameter servers each worker has a separate
    one. `stages` is 0 if the model is not cut, and each stage has `memory_bytes`, None for no limit. Returns the stages
    of a model that is cut, see `train.pipeline.stage_models.describe_partition`, and as `unverified` the operations
    whose bits may vary with oneDNN's kernels, see `primitives.find_unverified`.
    """
    source = opening.open_source(config, data_dir)
    if isinstance(source, feeds.IndexedSource):
        shares = batch_divisor
        if config.loop != "fit":
            shares = (config.bitwise_elastic or shares) * (config.micro_batches if source.in_memory else 1)
        feeds.check_sizes(source.train_examples, config.global_batch // shares)

    new_model = functools.partial(models.build_configured, config, source.feature_shape, source.num_outputs)
    partition: dict[str, Any] = {}
    num_parts = max(batch_divisor * config.micro_batches, config.bitwise_elastic)
    if stages:
        patches.apply()
        tf.config.threading.set_intra_op_parallelism_threads(config.threads)
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()
        with precision_policy(precision_of(strategy, config.precision)):
            model, _, _ = without_values(new_model)
        shaped = rebuild_with_shape(model, source.feature_shape)
        partition = describe_partition(shaped, config, stages, pipelines=pipelines, memory_bytes=memory_bytes)
    else:
        model = new_model()
        layer_state.check_saved(model, config.model)
        if strategies.get(strategy).collective:
            layer_state.check_sent(model, config.model)
        optimizers.check_replicas(optimizers.build_for_model(config, model), config.optimizer.name, replicas)
        _check_state(model, source.feature_shape, num_parts, config)
        if config.loop == "fit":
            fit_checks.check_model(config, model, strategy, replicas)
    _check_gradients(config, model, source.feature_shape, cut=bool(stages))
    _check_ranges(config, model, source)
    if getattr(model, "compiled", False):
        warn(
            f"--model {config.model!r} is compiled, which has no effect: name optimizer, loss and metrics by "
            "--optimizer.name, --loss and --metrics"
        )
    if type(model).test_step is not keras.Model.test_step:
        warn(
            f"--model {config.model!r} overrides test_step, which evaluations do not call: their results are those of "
            "--loss and --metrics"
        )
    outputs = models.call_symbolically(model, source.feature_shape)
    shapes = source.label_shape, models.output_shapes(outputs)
    objectives.check_outputs(config, source.num_outputs, shapes)
    objective = objectives.build_configured(config, classifies=source.classifies, shapes=lambda: shapes)
    _check_logits(config, model, source.feature_shape, cut=bool(stages))
    traced = _trace_model(model, source.feature_shape, cut=bool(stages))
    model_graph, (_, output_masks) = traced.graph, traced.structured_outputs
    graph = loss_checks.check_objective(
        config, objective, source, outputs, output_masks, strategy=strategy, num_parts=num_parts
    )
    random_operations.warn_of_assigning(f"--loss {config.loss!r}", graph)
    random_operations.warn_of_drawing(f"--loss {config.loss!r}", graph)
    _warn_of_tensorflow(config, model, model_graph)
    _check_assigned_weights(config, model, model_graph, 0 if stages else num_parts)
    if config.loop == "fit" and (method := models.find_override(model)):
        unverified = {instructions: [f"the model's {method}"] for instructions in preload.LARGEST_ISA}
    else:
        unverified = primitives.find_unverified([model_graph, graph])
    return partition | {"unverified": unverified}


def _check_ranges(config: TrainConfig, model: keras.Model, source: Source) -> None:
    if not source.in_memory:
        return
    leaves, files = source.record.train.example["features"], source.record.train.files
    features = named.in_words(named.each(lambda *both: both, leaves, input_types.input_dtypes(model, leaves)))
    for file, (which, (leaf, dtype)) in zip(files, features.items(), strict=False):  # then files of labels
        if not leaf.dtype.startswith("int") or (dtype == "float32" and getattr(model, "inputs", None)):
            continue  # Keras also rounds for a float input
        computes = COMPUTES.get(config.precision, model.compute_dtype)
        most = input_types.EXACT[computes] if dtype == "float32" else tf.as_dtype(dtype).max
        least = -most if dtype == "float32" else tf.as_dtype(dtype).min
        values = np.memmap(file.path, leaf.dtype, "r")
        if wrong := [value for value in (int(values.min()), int(values.max())) if not least <= value <= most]:
            raise UsageError(
                f"--model {config.model!r} takes features{which} as {computes if dtype == 'float32' else dtype}, which "
                f"cannot hold {wrong[0]}; {input_types.INSTEAD}"
            )


def _check_logits(config: TrainConfig, model: keras.Model, feature_shape: Named, *, cut: bool) -> None:
    """Check that the outputs for a cross entropy of logits are not probabilities; `cut`: variables have no values."""
    losses, logits = parts.parse_losses(config.loss), "sparse_categorical_crossentropy"
    if ":" not in config.model or logits not in losses.values():
        return

    outputs, _ = _trace_model(model, feature_shape, cut=cut, training=False).structured_outputs
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


def _check_state(model: keras.Model, feature_shape: Named, num_parts: int, config: TrainConfig) -> None:
    """Check that layers' state can be combined in a step of several parts, or of virtual shards."""
    state = layer_state.LayerState(model, num_parts)
    weights = model.trainable_variables if config.bitwise_elastic else []
    unknown = layer_state.tensorflow_variables(model) if num_parts > 1 else {}

    def forward(features: Named) -> None:
        with state.isolate(weights, [tf.convert_to_tensor(variable.value) for variable in weights]):
            model(features, training=True)

    if not (state.variables or weights or unknown):
        return
    graph = _trace(forward, model, feature_shape).graph
    in_parts = config.micro_batches > 1 or config.bitwise_elastic > 0
    for where, variable in layer_state.find_assigned(unknown, graph).items():
        if in_parts or variable.aggregation == tf.VariableAggregation.NONE:
            advice = "use --loop custom" if is_legacy() else "make it with add_weight(trainable=False)"
            raise UsageError(
                f"--model {config.model!r}: {where} is a tf.Variable, which each replica or micro-batch would assign "
                f"by itself; {advice}"
            )


def _check_assigned_weights(config: TrainConfig, model: keras.Model, graph: tf.Graph, num_parts: int) -> None:
    """Check that no layer assigns weights, which a step of several parts does not merge as it merges layers' state."""
    if num_parts < 2 or is_legacy():
        return
    variables = {weight.path: weight.value for weight in layer_state.unmerged_weights(model)}
    for path in layer_state.find_assigned(variables, graph):
        problem = f"--model {config.model!r}: a layer assigns the weight {path}, which each replica or micro-batch does"
        if config.micro_batches > 1 or config.bitwise_elastic:
            raise UsageError(f"{problem} by itself; make it with add_weight(trainable=False)")
        warn(f"{problem} by itself; if the value depends on the examples, make it with add_weight(trainable=False)")


def _check_gradients(config: TrainConfig, model: keras.Model, feature_shape: Named, *, cut: bool) -> None:
    """Check that stages and virtual shards, which differentiate in their own way, do so as one device does."""
    if not cut and not config.bitwise_elastic:
        return
    weights = model.trainable_variables

    def with_gradient(*, isolated: bool = False) -> set[str]:
        """Return the paths of the weights on which outputs or losses of the model depend."""
        paths = set[str]()

        def differentiate(features: Named) -> None:
            scope: Any = contextlib.nullcontext()
            if cut:  # they have no values
                values, scope = [tf.zeros(weight.shape, weight.dtype) for weight in weights], ObservingScope()
                scope.collect_losses = True
                for weight, value in zip(weights, values, strict=True):
                    scope.add_update((weight, value))
            else:
                values = [weight.value for weight in weights]
            if isolated:
                values = [tf.convert_to_tensor(value) for value in values]
                scope = layer_state.LayerState(model, config.bitwise_elastic).isolate(weights, values)
            with tf.GradientTape(watch_accessed_variables=False) as tape, scope:
                tape.watch(values)
                outputs = [one for one in tf.nest.flatten(model(features, training=True)) if one.dtype.is_floating]
                targets = [*outputs, *model.losses]
            gradients = tape.gradient(targets, values)
            paths.update(weight.path for weight, one in zip(weights, gradients, strict=True) if one is not None)

        _trace(differentiate, model, feature_shape)
        return paths

    on_one_device = with_gradient()
    if cut and (others := [weight.path for weight in weights if weight.path not in on_one_device]):
        raise UsageError(f"--strategy pipeline: {others[0]} has no gradient, which stages need; --freeze its layer")
    if not cut and (lost := sorted(on_one_device - with_gradient(isolated=True))):
        raise UsageError(
            f"--bitwise-elastic: the gradient of {lost[0]} gets lost in a function with a custom gradient, such as "
            "keras.remat, that uses it from outside; pass it as an argument, or leave --bitwise-elastic out"
        )


def _warn_of_tensorflow(config: TrainConfig, model: keras.Model, graph: tf.Graph) -> None:
    """Warn of variables and random numbers of TensorFlow, which Keras 3 does not know."""
    if is_legacy():
        return
    variables = layer_state.tensorflow_variables(model)
    assigned = layer_state.find_assigned(variables, graph)
    trainable = [where for where, variable in variables.items() if variable.trainable and where not in assigned]
    if trainable:
        warn(
            f"--model {config.model!r}: {trainable[0]} is a tf.Variable, which Keras 3 does not train; make it with "
            "add_weight, or with trainable=False if it is not to be trained"
        )
    random_operations.warn_of_drawing(f"--model {config.model!r}", graph)


def _trace_model(model: keras.Model, feature_shape: Named, *, cut: bool, training: bool = True) -> Any:
    """Trace a model: features -> outputs, and a list of their masks."""

    def forward(features: Named) -> Any:
        with ObservingScope() if cut else contextlib.nullcontext():
            outputs = model(features, training=training)
            return outputs, [masks.mask_of(output) for output in tf.nest.flatten(outputs)]

    return _trace(forward, model, feature_shape)


def _trace(function: Any, model: keras.Model, feature_shape: Named) -> Any:
    """Trace a function of a model's features for a batch of `loss_checks.EXAMPLES`."""
    types = input_types.input_dtypes(model, feature_shape)
    specs = named.each(lambda shape, dtype: tf.TensorSpec([loss_checks.EXAMPLES, *shape], dtype), feature_shape, types)
    return tf.function(function, autograph=False).get_concrete_function(specs)
