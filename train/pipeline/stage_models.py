"""The model of each stage, the same in every task, and the variables of the stages that each task holds.

Keras knows which layer created a variable, but not which layers read it: an output layer can multiply by the weights of
the embedding. So each stage is traced once, with zeros for variables.

Every task builds the whole model, without memory for its variables. Then the variables of its stage are initialized, in
their order of creation and from the seeds that were drawn for all variables, so that their first values are those of
one device. The other variables remain handles without a value, which checkpoints leave out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable  # has no public name

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Stages
from cluster.contract.spec import ClusterSpec, Task
from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import layer_state, optimizers
from train.model.export import is_legacy
from train.patches import deferred_values, optimizer_averages, placed_seeds
from train.pipeline import model_blocks
from train.pipeline.model_blocks import ModelBlock, ObservingScope
from train.pipeline.partition import Constraints, StageCost, partition
from train.saving.trees import Joint
from train.strategy import precision_policy


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
    costs = partition([model_blocks.estimate_cost(block, micro_batch, copies) for block in blocks], constraints, cut)
    models = build_models(model, [blocks[stage.first : stage.last] for stage in costs], micro_batch)
    unmerged = {id(weight) for stage in models for weight in layer_state.unmerged_weights(stage.model)}
    assigned = [variable.path for stage in models for variable in stage.changed if id(variable) in unmerged]
    if assigned and config.micro_batches > 1:
        raise UsageError(
            f"--micro-batches {config.micro_batches}: a layer assigns the weight {assigned[0]}, which each micro-batch "
            "does separately; make it with add_weight(trainable=False)"
        )
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
        stages = f"stages {' and '.join(map(str, numbers))}"
        if any(variable is other for other in changed):
            raise UsageError(
                f"--strategy pipeline: the forward pass changes {variable.path!r}, which {stages} use; use --cut to "
                "keep its users in one stage"
            )
        if variable.trainable and asynchronous:
            raise UsageError(
                f"--schedule pipedream: {stages} use {variable.path!r}, and no stage waits for another's gradient; use "
                "--schedule 1f1b"
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


class TaskStages:
    """The stages of a model, and this task's share of them."""

    def __init__(self, spec: ClusterSpec, task: Task, config: TrainConfig, run: RunFolder | None) -> None:
        self._config, self._run = config, run
        self.stages = spec.stages
        alone = len(spec.members) < 2
        self.task = spec.members.index(task) if spec.members else 0
        self.pipelines = spec.replicas
        self.pipeline = self.task // self.stages if not alone else 0
        """Index of this task's pipeline."""
        self.held = range(self.stages) if alone else range(self.task % self.stages, self.task % self.stages + 1)
        """The stages that this task has."""
        self.models: list[StageModel] = []
        """The model of each stage, with layers and variables of the whole model."""
        self._users: dict[int, list[int]] = {}
        self._held: dict[int, tf.Variable] = {}
        self._written: set[int] = set()
        """Ids of the variables that this task writes: the first of several stages that share a variable writes it."""

    @property
    def whole(self) -> bool:
        return len(self.held) == self.stages

    def build(self, new_model: Callable[[], keras.Model], feature_shape: Any = None) -> keras.Model:
        """Build the model, with values only for the variables of this task's stages."""
        model, created, assigned = without_values(new_model)
        shaped = model_blocks.rebuild_with_shape(model, feature_shape)
        self.models = load_models(shaped, self._config, self.stages, self._run, self.pipelines)
        for number, stage in enumerate(self.models):
            for variable in stage.used:
                self._users.setdefault(id(variable), []).append(number)
        self._give_values(created, assigned)
        return model

    def list_first_used(self, stage: int) -> list[keras.Variable]:
        """Return the trained variables whose first user is this stage."""
        return [variable for variable in self.models[stage].trained if self._users[id(variable)][0] == stage]

    @property
    def shared(self) -> list[tuple[keras.Variable, list[int]]]:
        """The trained variables that several stages use, and the numbers of those stages."""
        return [(variable, numbers) for variable, numbers in find_shared(self.models) if variable.trainable]

    def build_optimizer(self, optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
        """Build an optimizer of the whole model, with values only for the variables of this task's weights."""
        optimizer_averages.average_changed_weights(optimizer)
        with keras.StatelessScope(initialize_variables=False):
            optimizer.build(model.trainable_variables)
        weights = model.trainable_variables
        for name, slots in vars(optimizer).items():
            # Lists with a variable per weight, such as `_momentums`; `_variables` has all of them.
            if isinstance(slots, list) and len(slots) == len(weights) and name != "_variables":
                for slot, weight in zip(slots, weights, strict=True):
                    if isinstance(slot, keras.Variable):
                        self._users[id(slot)] = self._users[id(weight)]
        self._give_values(_take_uninitialized())

    def device(self, stage: int) -> str | None:
        """Return the device of a stage if this task has several; None lets TensorFlow choose."""
        if not self.whole or self.stages == 1:
            return None
        kind = "GPU" if len(tf.config.list_physical_devices("GPU")) >= self.stages else "CPU"
        return f"/device:{kind}:{stage}"

    def joint(self, limit_s: float) -> Joint:
        """Return this task's part in writing checkpoints, which the first pipeline's tasks write."""
        return Joint(self.task, self.stages, lambda variable: id(variable) in self._written, limit_s)

    def release(self) -> None:
        """Free the memory of this task's variables, which must not be used afterwards."""
        for variable in self._held.values():
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], variable.dtype))

    def _give_values(self, variables: Iterable[keras.Variable], assigned: Mapping[int, tf.Tensor] = {}) -> None:
        for variable in variables:
            users = self._users.get(id(variable), [])
            if not users or any(stage in self.held for stage in users):
                with tf.device(self.device(users[0] if users else 0)):
                    variable._deferred_initialize()
                    if id(variable) in assigned:
                        variable.assign(assigned[id(variable)])
                if users:
                    self._held[id(variable.value)] = variable.value
                    self._written |= {id(variable.value)} if users[0] in self.held else set()
            else:
                leave_without_value(variable)


def without_values(
    new_model: Callable[[], keras.Model],
) -> tuple[keras.Model, list[keras.Variable], dict[int, tf.Tensor]]:
    """Build a model without memory; return it, its variables, and by `id` values that `new_model` assigned to them."""
    with deferred_values.DeferringScope() as scope:
        model = new_model()
    created = _take_uninitialized()
    values = {id(variable): scope.get_current_value(variable) for variable in created}
    return model, created, {key: value for key, value in values.items() if value is not None}


def to_restore(new_model: Callable[[], keras.Model]) -> keras.Model:
    """Build a model whose weights get memory only when a checkpoint is restored, which lacks random states."""
    model, created, _ = without_values(new_model)
    weights = {id(weight) for weight in model.weights}
    for variable in created:
        if id(variable) in weights:
            leave_without_value(variable)
        else:
            variable._deferred_initialize()
    return model


def as_trained(new_model: Callable[[], keras.Model], precision: str) -> keras.Model | None:
    """Build a model as it was trained, without memory for its variables; None if it computes in float32."""
    if precision == "fp32" or is_legacy():
        return None
    with precision_policy(precision):
        return to_restore(new_model)


def _take_uninitialized() -> list[keras.Variable]:
    """Take over the variables that Keras has created without a value, in order."""
    variables = global_state.get_global_attribute("uninitialized_variables") or []
    global_state.set_global_attribute("uninitialized_variables", [])
    return variables


def leave_without_value(variable: keras.Variable) -> None:
    """Make a variable a handle without a value."""
    handle = UninitializedVariable(
        trainable=variable.trainable, name=variable.name, shape=variable.shape, dtype=variable.dtype
    )
    variable._initialize(handle)
    variable._initializer = None
