"""A Keras model as a chain of blocks: where it can be cut, the cost of each block, and the model of each stage.

A model can be cut where exactly one tensor crosses, before a layer with weights; a mask of the tensor crosses with it.
The tensor has a row for each example: without one, as after `keras.ops.reshape(x, (-1, 8))`, no stage knows its size.
Operations that a compiler may fuse with the layer before them (activations, additions, batch normalization) stay in the
same stage, because a cut there would change bits. Stages can share a layer's weights, but not its state, such as
averages of batch normalization.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from cluster.system.errors import UsageError
from train.model.masks import mask_of
from train.pipeline.partition import BlockCost


@dataclass(frozen=True)
class ModelBlock:
    """A part of a model that is never cut: Keras's calls of layers in topological order, from one tensor to another."""

    nodes: tuple[Any, ...]
    inputs: Any
    outputs: Any
    inputs_masked: bool  # whether this tensor has a mask when the model is called
    outputs_masked: bool

    @property
    def layers(self) -> tuple[keras.Layer, ...]:
        """The block's layers, in the order of their first calls."""
        return tuple(dict.fromkeys(node.operation for node in self.nodes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def weights(self) -> list[keras.Variable]:
        """Weights of the block's layers without duplicates, frozen or not."""
        weights = [weight for layer in self.layers for weight in getattr(layer, "weights", [])]
        return list({id(weight): weight for weight in weights}.values())


def split_model(model: keras.Model) -> list[ModelBlock]:
    """Return the blocks of a Sequential or functional model with one input and one output."""
    _check_calls(model)
    if isinstance(model, keras.Sequential):
        model = model._functional
    if not isinstance(model, keras.Model) or not hasattr(model, "_nodes_by_depth") or len(model.inputs) != 1:
        raise UsageError(
            "--strategy pipeline needs a Sequential or functional Keras model with one input; this one is "
            f"{type(model).__name__}"
        )
    if len(model.outputs) != 1 or isinstance(model.output, Mapping):
        raise UsageError(
            f"--strategy pipeline needs a model with one output, not a dictionary; this one has {len(model.outputs)}"
        )
    nodes = _sorted_nodes(model)
    if unknown := [node.operation.name for node in nodes if None in node.output_tensors[0].shape[1:]]:
        raise UsageError(
            f"--strategy pipeline needs known shapes, and the shape of the output of {unknown[0]!r} is unknown; build "
            "the model from the feature shape that its function receives"
        )
    masks, without_rows = _find_masks(model, nodes)
    cuts = [(0, model.inputs[0])]
    cuts += [(at, crossing) for at in range(1, len(nodes)) if (crossing := _cut_before(nodes, at, model)) is not None]
    cuts = [cut for cut in cuts if masks.get(id(cut[1]), 0) in (0, len(cut[1].shape) - 1)]
    cuts = [cut for cut in cuts if id(cut[1]) not in without_rows]
    cuts.append((len(nodes), model.outputs[0]))
    return [
        ModelBlock(tuple(nodes[first:last]), inputs, outputs, id(inputs) in masks, id(outputs) in masks)
        for (first, inputs), (last, outputs) in itertools.pairwise(cuts)
    ]


def _check_calls(model: keras.Model) -> None:
    """Check that a model computes what its graph says."""
    for name in ("call", "__call__"):
        if not getattr(getattr(type(model), name), "__module__", "").startswith("keras."):
            raise UsageError(
                f"--strategy pipeline: {type(model).__name__} overrides {name}, which stages would leave out"
            )


def rebuild_with_shape(model: keras.Model, feature_shape: Any) -> keras.Model:
    """Rebuild a model with an incompletely declared input shape for this shape, with the same layers."""
    _check_calls(model)
    functional = model._functional if isinstance(model, keras.Sequential) else model
    inputs: list[Any] = getattr(functional, "inputs", None) or []
    if len(inputs) != 1 or not hasattr(functional, "_nodes_by_depth") or None not in inputs[0].shape[1:]:
        return model
    declared = inputs[0]
    inputs = keras.Input(feature_shape, dtype=declared.dtype, name=declared.name)
    outputs = functional._run_through_graph([inputs], operation_fn=lambda operation: operation)
    return keras.Model(inputs, outputs, name=model.name)


def build_stage_model(blocks: Sequence[ModelBlock], number: int) -> keras.Model:
    """Build the model of a stage's blocks, with the layers and variables of the whole model."""
    inputs, outputs = blocks[0].inputs, blocks[-1].outputs
    if blocks[0].inputs_masked:
        packed = keras.Input(batch_shape=(*inputs.shape[:-1], inputs.shape[-1] + 1), dtype=inputs.dtype)
        layers = keras.Model(inputs, outputs)
        outputs = layers._run_through_graph([UnpackMask()(packed)], operation_fn=lambda operation: operation)
        inputs = packed
    if blocks[-1].outputs_masked:
        outputs = PackMask()(outputs)
    model = keras.Model(inputs, outputs, name=f"stage_{number}")
    if number:
        model.autocast = False  # only the inputs of the first stage are inputs of the model, which would cast them
    return model


class PackMask(keras.layers.Layer):
    """Appends the mask of its inputs to them: `[..., C]` to `[..., C + 1]`."""

    def __init__(self) -> None:
        super().__init__(autocast=False)
        self.supports_masking = True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        mask = keras.ops.ones_like(inputs[..., 0]) if mask is None else mask  # None only where Keras infers shapes
        return keras.ops.concatenate([inputs, keras.ops.cast(mask, inputs.dtype)[..., None]], -1)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Return None: the mask is in the outputs."""


class UnpackMask(keras.layers.Layer):
    """Separates the mask that `PackMask` has appended."""

    def __init__(self) -> None:
        super().__init__(autocast=False)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        return inputs[..., :-1]

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:  # noqa: ARG002  # Keras's signature
        """Return the mask, `[...] bool`."""
        return inputs[..., -1] > 0.5


def find_crossing(model: keras.Model, layer: str = "") -> tuple[str, list[str]] | None:
    """Return a layer before which several tensors cross, and the layers that output them; None if only one crosses.

    The layer is `layer`, or without a name the one nearest to the middle of the model.
    """
    if isinstance(model, keras.Sequential):
        model = model._functional
    nodes = _sorted_nodes(model)
    places = [at for at in range(1, len(nodes)) if nodes[at].operation.name == (layer or nodes[at].operation.name)]
    makers = {id(tensor): node.operation.name for node in nodes for tensor in node.output_tensors}
    for at in sorted(places, key=lambda at: abs(at - len(nodes) // 2)):
        tensors = _crossing(nodes, at, model)
        if len(tensors) > 1:
            return nodes[at].operation.name, [makers.get(id(tensor), tensor.name) for tensor in tensors]
    return None


def estimate_cost(block: ModelBlock, micro_batch: int, slots: int) -> BlockCost:
    """Estimate the cost of a block from its FLOPs and the sizes of its tensors.

    `micro_batch` is in examples; `slots` counts tensors per weight besides its gradient, such as the optimizer's.
    """
    parameters = sum(math.prod(weight.shape) for weight in block.weights)
    trainable = sum(math.prod(weight.shape) for weight in block.weights if weight.trainable)
    kept = flops = 0
    for node in block.nodes:
        outputs = sum(math.prod(tensor.shape[1:]) for tensor in node.output_tensors)
        places = max(math.prod(tensor.shape[1:-1]) for tensor in node.output_tensors)
        scores = width = 0
        if isinstance(node.operation, keras.layers.MultiHeadAttention):
            scores, width = node.operation.num_heads * places**2, node.operation.key_dim
        kept += 4 * micro_batch * (outputs * (1 + _kept_inside(node.operation)) + 2 * scores)
        flops += micro_batch * (outputs + 4 * scores * width)
        for variable in getattr(node.operation, "weights", []):
            if len(variable.shape) >= 2 and "embedding" not in variable.path:  # two operations for each use of a weight
                flops += micro_batch * 2 * math.prod(variable.shape) * places
    return BlockCost(
        block.names,
        float(3 * flops),  # the backward pass takes two products for each one of the forward pass
        4 * parameters,
        4 * trainable * (1 + slots),
        kept,
        4 * micro_batch * math.prod(block.outputs.shape[1:]),
    )


def _kept_inside(layer: keras.Layer) -> int:
    """Return the memory that a layer keeps internally for its backward pass, in multiples of its outputs."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return 4  # queries, keys, values and their combination
    if isinstance(layer, keras.layers.LayerNormalization):
        return 2  # centred, and scaled
    return 4 if getattr(layer, "activation", None) is keras.activations.gelu else 0  # the parts of its formula


def _sorted_nodes(model: keras.Model) -> list[Any]:
    depths = model._nodes_by_depth
    nodes = [node for depth in sorted(depths, reverse=True) for node in depths[depth]]
    return [node for node in nodes if not node.is_input]


def _find_masks(model: keras.Model, nodes: Sequence[Any]) -> tuple[dict[int, int], set[int]]:
    """Return the ranks of the masks that tensors have when the model is called, and which have no row per example.

    Both by the tensors' ids. Keras's symbolic tensors do not show them all: a layer that returns its inputs returns
    their mask, too.
    """
    ranks, without_rows = dict[int, int](), set[int]()
    zeros_shape = [model.inputs[0].shape[0] or 2, *model.inputs[0].shape[1:]]
    order = iter(nodes)

    def call_and_record(operation: Any, *inputs: Any, **options: Any) -> Any:
        outputs = operation(*inputs, **options)
        for symbolic, output in zip(next(order).output_tensors, tf.nest.flatten(outputs), strict=True):
            if (mask := mask_of(output)) is not None:
                ranks[id(symbolic)] = mask.shape.rank
            if not output.shape[:1].is_compatible_with(zeros_shape[:1]):
                without_rows.add(id(symbolic))
        return outputs

    with tf.__internal__.FuncGraph("masks").as_default(), ObservingScope():
        model._run_through_graph([tf.zeros(zeros_shape, model.inputs[0].dtype)], call_fn=call_and_record)
    return ranks, without_rows


class ObservingScope(keras.StatelessScope):
    """Records which variables are read and assigned, and reads variables without a value as zeros."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read.add(id(variable))
        if (assigned := super().get_current_value(variable)) is not None:
            return assigned
        return tf.zeros(variable.shape, variable.dtype) if variable._value is None else None


def _cut_before(nodes: Sequence[Any], at: int, model: keras.Model) -> Any | None:
    """Return the only tensor that crosses before a node, if the model can be cut there; otherwise None."""
    tensors, layer = _crossing(nodes, at, model), nodes[at].operation
    if len(tensors) != 1 or tensors[0] is model.inputs[0] or not keras.backend.is_float_dtype(tensors[0].dtype):
        return None  # integers have no gradient
    before = {id(node.operation) for node in nodes[:at]}
    if not _has_weights(layer) or isinstance(layer, keras.layers.BatchNormalization) or id(layer) in before:
        return None
    again = [node.operation for node in nodes[at:] if id(node.operation) in before]
    # Keras regards every call of the layer that made a model's input as that input.
    if any(_has_state(repeated) or repeated is tensors[0]._keras_history.operation for repeated in again):
        return None
    return tensors[0] if any(_has_weights(node.operation) for node in nodes[:at]) else None


def _has_state(layer: Any) -> bool:
    """Whether a layer has variables other than weights; frozen weights are not state."""
    layers = layer._flatten_layers() if isinstance(layer, keras.Layer) else ()
    return any(sublayer._non_trainable_variables for sublayer in layers)


def _has_weights(layer: Any) -> bool:
    """Whether a layer has weights, frozen or not: freezing does not change where a model can be cut."""
    return bool(getattr(layer, "weights", None))


def _crossing(nodes: Sequence[Any], at: int, model: keras.Model) -> list[Any]:
    """Return the tensors that exist before a node and that it or later nodes need."""
    made = {id(tensor) for node in nodes[:at] for tensor in node.output_tensors} | {id(model.inputs[0])}
    needed = [tensor for node in nodes[at:] for tensor in node.input_tensors] + list(model.outputs)
    return list({id(tensor): tensor for tensor in needed if id(tensor) in made}.values())
