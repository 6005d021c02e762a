"""`Model.fit` builds the model from one replica's batch under MultiWorkerMirroredStrategy, and all parts in its scope.

Defect: `TensorFlowTrainer._maybe_symbolic_build` averages the first batch over all replicas, which collectives refuse,
and a model with a `train_step` but no `call` cannot be built at all. Keras issue 20585,
docs/internals/upstream/keras-20585.md. The batches that it takes from a Python generator, or from a dataset that
reads one, are lost to the training, and `Dataset.shuffle` with a seed begins with the order of its second epoch.
This is left for datasets that do not know the number of features.
Metrics and optimizers are those of a single replica if `compile` is called outside of the strategy's scope, which
Keras 2 entered.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_every_script_patch_must_still_be_needed
Not applied: if the source of `_maybe_symbolic_build` reduces nothing.
"""

from typing import Any

import keras
from keras import tree
from keras.src.backend.tensorflow import trainer  # has no public name


def _maybe_symbolic_build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    strategy = model._distribute_strategy
    if strategy is None:
        return
    with strategy.scope():
        _move_into_scope(optimizers_of(model), strategy)
        if type(model).call is keras.Model.call:  # trained by its `train_step`, which takes no symbolic tensors
            _build_optimizer(model, strategy.num_replicas_in_sync)
        else:
            _build(model, data_batch if iterator is None else _parts(iterator, strategy))
        _move_into_scope(model.metrics, strategy)


def _parts(iterator: Any, strategy: Any) -> Any:
    """Return the shapes and types of a replica's part of a batch."""
    parts = tree.map_structure(_part, iterator._distributed_dataset.element_spec)
    if all(None not in part.shape[1:][-1:] or "float" not in part.dtype for part in tree.flatten(parts)):
        return parts
    _, _, batches = next(iter(iterator))  # layers need the number of features, which only a batch has
    return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], next(batches))


def _part(spec: Any) -> keras.KerasTensor:
    """Return the shape and type of a replica's part of a batch."""
    spec = getattr(spec, "_value_specs", [spec])[0]  # one for each of the task's replicas
    return keras.KerasTensor(spec.shape.as_list(), keras.backend.standardize_dtype(spec.dtype))


def _build(model: Any, data_batch: Any) -> None:
    try:
        model._symbolic_build(data_batch=data_batch)
    except AttributeError:  # of a metric that creates its variables in `train_step`: build without results
        model.get_metrics_result = dict
        try:
            model._symbolic_build(data_batch=data_batch)
        finally:
            del model.get_metrics_result


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model, also those inside of a LossScaleOptimizer."""
    optimizers = [part for part in vars(model).values() if isinstance(part, keras.optimizers.Optimizer)]
    return [*(part.inner_optimizer for part in optimizers if hasattr(part, "inner_optimizer")), *optimizers]


def _move_into_scope(parts: list[Any], strategy: Any) -> None:
    """Create the variables of optimizers or metrics again that were created outside of the scope of the model."""
    for part in parts if strategy.num_replicas_in_sync > 1 else []:
        if hasattr(part, "_distribution_strategy"):
            part._distribution_strategy = strategy
        for variable in part.variables:
            if not strategy.extended.variable_created_in_scope(variable._value):
                variable._initialize(variable.numpy())


def _build_optimizer(model: Any, num_replicas: int) -> None:
    """Build the optimizer of a model without `call`, whose layers and other optimizers the user has built."""
    unbuilt = [layer.name for layer in model._flatten_layers(include_self=False) if not layer.built]
    if not unbuilt:
        if model.optimizer is not None:
            model.optimizer.build(model.trainable_variables)
        optimizers = {name: part for name, part in vars(model).items() if isinstance(part, keras.optimizers.Optimizer)}
        unbuilt = [name for name, optimizer in optimizers.items() if not optimizer.built]
    if unbuilt and num_replicas > 1:
        raise ValueError(
            f"{type(model).__name__} has a train_step and no call: on {num_replicas} replicas build "
            f"{', '.join(unbuilt)} before fit: layers with build(input_shape) or a keras.Input, "
            "optimizers with build(variables)"
        )


REPLACED = [(trainer.TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build, {"defect": r"\.reduce\("})]
