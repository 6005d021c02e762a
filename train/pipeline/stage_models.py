"""The model of each stage, the same in every task, and the variables and seeds that a call of each uses.

Keras knows which layer created a variable, but not which layers read it: an output layer can multiply by the weights of
the embedding. So each stage is traced once, with zeros for variables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Stages
from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import layer_state, optimizers
from train.patches import placed_seeds
from train.pipeline import model_blocks
from train.pipeline.model_blocks import ModelBlock, ObservingScope
from train.pipeline.partition import Constraints, StageCost, partition


@dataclass(frozen=True)
class StageModel:
    """The model of a stage.

    Attributes:
        model: the model of the stage, with layers and variables of the whole model.
        used: variables of the whole model that the stage has or reads, in the order of the whole model.
        changed: variables that the stage assigns in training, such as averages of batch normalization.
        drawn: number of seeds that the forward pass of all earlier stages draws from each generator, by its `id`.
        regularized: variables whose regularizers count here, by `id`: the first of several stages adds them.
    """

    model: keras.Model
    used: list[keras.Variable]
    changed: list[keras.Variable]
    drawn: Mapping[int, int]
    regularized: frozenset[int]

    @property
    def trained(self) -> list[keras.Variable]:
        return [variable for variable in self.used if variable.trainable]

    def losses(self) -> list[tf.Tensor]:
        """Return the losses that the model's last call added, and those of its regularizers."""
        weights = self._regularized_weights
        terms = self.model.losses
        added = len(terms) - len(weights)  # Keras lists those of regularizers last
        pairs = zip(terms[added:], weights, strict=True)
        return terms[:added] + [term for term, weight in pairs if id(weight) in self.regularized]

    def penalty(self) -> float:
        """Return the sum of the regularizers that count in this stage, for the current weights."""
        weights = [weight for weight in self._regularized_weights if id(weight) in self.regularized]
        return sum(float(weight.regularizer(weight)) for weight in weights)

    @property
    def _regularized_weights(self) -> list[keras.Variable]:
        return [weight for weight in self.model.trainable_weights if weight.regularizer is not None]


def partition_model(
    model: keras.Model,
    config: TrainConfig,
    stages: int,
    *,
    memory_bytes: int | None = None,
    layers: Sequence[str] | None = None,
    pipelines: int = 1,
) -> tuple[list[StageCost], list[StageModel]]:
    """Return the stages of the best partition of a model, or of the partition that its configuration names.

    `layers` are the first layers of all stages but the first; None for those in the configuration. `memory_bytes` is
    the memory of each stage, None for no limit, and `pipelines` is the number of pipelines that share each global
    batch.
    """
    blocks, pipeline = model_blocks.split_model(model), config.pipeline
    if blocks[-1].outputs_masked:
        raise UsageError(
            f"--stages {stages}: a mask reaches the output of {model.layers[-1].name!r}, and no stage knows the "
            "unmasked positions of the whole batch; leave the mask out, or use another strategy"
        )
    cut = [name.strip() for name in pipeline.cut.split(",") if name.strip()] if layers is None else layers
    _check_blocks(model, blocks, stages, cut)
    constraints = Constraints(stages, pipeline.schedule, config.micro_batches, pipeline.remat, memory_bytes)
    weight, optimizer = keras.Variable(tf.zeros([2, 3])), optimizers.build_optimizer(config)
    optimizer.build([weight])
    slots = sum(variable.shape == weight.shape for variable in optimizer.variables)
    copies = slots + (config.micro_batches > 1)  # a gradient, and the sum of the previous ones
    micro_batch = config.global_batch // (pipelines * config.micro_batches)
    block_costs = [model_blocks.estimate_cost(block, micro_batch, copies) for block in blocks]
    costs = partition(block_costs, constraints, cut)
    models = build_models(model, [blocks[stage.first : stage.last] for stage in costs], micro_batch)
    check_models(models, remat=pipeline.remat, asynchronous=pipeline.schedule == "pipedream", pipelines=pipelines)
    return costs, models


def load_models(
    model: keras.Model, config: TrainConfig, stages: int, run: RunFolder | None = None, pipelines: int = 1
) -> list[StageModel]:
    """Return the model's stages as planned, according to the record of the run; see `partition_model`."""
    planned = records.read_record(run.stages, Stages.from_json, Stages()) if run else Stages()
    # A resumed run may have another number of stages.
    layers = planned.cut if len(planned.cut) == stages - 1 else None
    return partition_model(model, config, stages, layers=layers, pipelines=pipelines)[1]


def describe_partition(
    model: keras.Model, config: TrainConfig, stages: int, *, pipelines: int = 1, memory_bytes: int | None = None
) -> dict[str, Any]:
    """Describe the stages of a plan, with their operations as `cost`, and the record that tells tasks the partition."""
    costs, _ = partition_model(model, config, stages, memory_bytes=memory_bytes, pipelines=pipelines)
    total, described = sum(stage.flops for stage in costs) or 1.0, []
    for stage in costs:
        weights = sum(block.parameter_bytes for block in stage.blocks)
        described.append(
            {
                "stage": stage.number,
                "first": stage.layers[0],
                "last": stage.layers[-1],
                "layers": list(stage.layers),
                "parameters": weights // 4,
                "state_bytes": weights + sum(block.state_bytes for block in stage.blocks),
                "in_flight": stage.in_flight,
                "micro_batch_bytes": sum(block.activation_bytes for block in stage.blocks),
                "activation_bytes": stage.activation_bytes,
                "memory_bytes": stage.memory_bytes,
                "cost": stage.flops,
                "share": stage.flops / total,
            }
        )
    record = {"cut": [stage.layers[0] for stage in costs[1:]]}
    return {"memory_bytes": memory_bytes, "stages": described, "record": record}


def _check_blocks(model: keras.Model, blocks: Sequence[ModelBlock], stages: int, names: Sequence[str]) -> None:
    borders = {block.names[0] for block in blocks}
    inside = [name for name in names if name not in borders]
    places = [model_blocks.find_crossing(model, name) for name in inside]
    if stages > len(blocks) == 1:
        places.append(model_blocks.find_crossing(model))
    for layer, makers in filter(None, places):
        crossed = f"the outputs of {' and '.join(repr(name) for name in makers)} cross the cut before {layer!r}"
        option = f"--cut {layer!r}" if layer in inside else f"--stages {stages}"
        raise UsageError(f"{option}: several tensors cross there: {crossed}, and only one may")


def build_models(whole: keras.Model, stages: Sequence[Sequence[ModelBlock]], micro_batch: int) -> list[StageModel]:
    """Build the models of stages from the blocks of each, for micro-batches of `micro_batch` examples."""
    parts, drawn, seen = [], dict[int, int](), set[int]()
    for number, blocks in enumerate(stages):
        model = model_blocks.build_stage_model(blocks, number)
        before, (read, changed, graph) = dict(drawn), _observe(model, micro_batch, drawn)
        for name in layer_state.find_assigned(layer_state.tensorflow_variables(model), graph):
            raise UsageError(
                f"--strategy pipeline: the forward pass assigns {name}, a tf.Variable; make it with "
                "add_weight(trainable=False)"
            )
        stage_ids = {id(variable) for variable in model.variables}
        used, assigned = (
            [variable for variable in whole.variables if id(variable) in ids] for ids in (read | stage_ids, changed)
        )
        parts.append(StageModel(model, used, assigned, before, frozenset(stage_ids - seen)))
        seen |= stage_ids
    return parts


def check_models(parts: Sequence[StageModel], *, remat: bool, asynchronous: bool, pipelines: int) -> None:
    """Check that training in stages gives the results of one device."""
    changed = [variable for part in parts for variable in part.changed]
    if changed and remat:
        raise UsageError(
            f"--remat: the forward pass changes {changed[0].path!r}, and recomputing it would change it twice "
            "for each micro-batch; leave --remat out"
        )
    if changed and pipelines > 1:
        raise UsageError(
            f"--workers for {pipelines} pipelines: the forward pass changes {changed[0].path!r}, which would "
            "differ between them; use one pipeline"
        )
    if asynchronous and (assigned := [variable for variable in changed if variable.trainable]):
        raise UsageError(
            f"--schedule pipedream: the forward pass assigns {assigned[0].path!r}, a weight in several versions; use "
            "--schedule 1f1b"
        )
    for variable, numbers in find_shared(parts):
        layers = " and ".join(repr(_name_user(parts[number].model, variable)) for number in numbers)
        if any(variable is other for other in changed):
            raise UsageError(
                f"--strategy pipeline: the forward pass changes {variable.path!r}, which {layers} use in "
                "different stages; use --cut to keep them in one stage"
            )
        if variable.trainable and asynchronous:
            raise UsageError(
                f"--schedule pipedream: {layers} use {variable.path!r} in different stages, and no stage waits for "
                "another's gradient; use --schedule 1f1b"
            )


def find_shared(parts: Sequence[StageModel]) -> list[tuple[keras.Variable, list[int]]]:
    """Return the variables that several stages use, and the numbers of those stages."""
    users: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for variable in part.used:
            users.setdefault(id(variable), []).append(number)
    used = {id(variable): variable for part in parts for variable in part.used}
    return [(used[key], numbers) for key, numbers in users.items() if len(numbers) > 1]


def _observe(model: keras.Model, micro_batch: int, drawn: dict[int, int]) -> tuple[set[int], set[int], Any]:
    """Call a model in a graph, count its draws, and return the ids of variables it reads and assigns, and the graph."""
    graph = tf.__internal__.FuncGraph("observed")
    with graph.as_default(), ObservingScope() as scope:
        zero = tf.zeros([], tf.int64)
        with placed_seeds.random_place(zero, zero, zero, drawn) as place:
            model(tf.zeros([micro_batch, *model.inputs[0].shape[1:]], model.inputs[0].dtype), training=True)
        drawn |= place.drawn
    return scope.read, set(scope.state_mapping), graph


def _name_user(model: keras.Model, variable: keras.Variable) -> str:
    for layer in model.layers:
        if any(variable is other for other in layer.variables):
            return str(layer.name)
    return str(model.name)
