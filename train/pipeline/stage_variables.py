"""The part of a model in stages that each task holds: the variables of its stage.

Every task builds the whole model, without memory for its variables. Then the variables of its stage are initialized, in
their order of creation and from the seeds that were drawn for all variables, so that their first values are those of
one device. The other variables remain handles without a value, which checkpoints leave out.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable  # has no public name

from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec, Task
from train.config import TrainConfig
from train.model.export import is_legacy
from train.patches import optimizer_averages
from train.pipeline.model_blocks import rebuild_with_shape
from train.pipeline.stage_models import StageModel, find_shared, load_models
from train.saving.trees import Joint
from train.strategy import precision_policy


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
        shaped = rebuild_with_shape(model, feature_shape)
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

    def joint(self) -> Joint:
        """Return this task's part in writing checkpoints, which the first pipeline's tasks write."""
        return Joint(self.task, self.stages, lambda variable: id(variable) in self._written)

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
    with keras.StatelessScope(initialize_variables=False) as scope:
        model = new_model()
    created = _take_uninitialized()
    values = {id(variable): scope.get_current_value(variable) for variable in created}
    return model, created, {key: value for key, value in values.items() if value is not None}


def to_restore(new_model: Callable[[], keras.Model]) -> keras.Model:
    """Build a model whose variables get memory only when a checkpoint is restored."""
    model, created, _ = without_values(new_model)
    for variable in created:
        leave_without_value(variable)
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
    if not type(variable._initializer).__module__.startswith("keras."):
        # Call it, as it may draw from a shared generator; Keras's initializers have separate seeds.
        variable._initializer(variable.shape, dtype=variable.dtype)
    handle = UninitializedVariable(
        trainable=variable.trainable, name=variable.name, shape=variable.shape, dtype=variable.dtype
    )
    variable._initialize(handle)
    variable._initializer = None
