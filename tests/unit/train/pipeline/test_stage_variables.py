"""Each task of a pipeline holds its own stage alone, with one device's first values, and all save one checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract import spec
from cluster.system.errors import RunFailed
from train import patches
from train.config import TrainConfig
from train.model import export, initial_weights
from train.model.architectures import transformer_lm
from train.patches import placed_seeds
from train.pipeline.stage_models import TaskStages, to_restore
from train.saving import saved_weights, trees
from train.saving.checkpoint import CheckpointManager

CONFIG = TrainConfig(global_batch=8, micro_batches=4)


def new_model() -> keras.Model:
    patches.apply()
    keras.utils.set_random_seed(3)
    model = transformer_lm((6,), 11, layers=2, width=8, heads=2)
    for weight in (model.trainable_variables[0], model.trainable_variables[-1]):  # as if it were pretrained
        weight.assign(np.full(weight.shape, 0.25))
    return model


class Holder:
    def __init__(self, folder: Path, task: int, stages: int, pipelines: int = 1) -> None:
        workers = stages * pipelines - 1
        cluster = spec.build(workers=workers, strategy="pipeline", pipelines=pipelines, devices=1)
        self.task_stages = TaskStages(cluster, cluster.tasks[task], CONFIG, None)
        self.model = self.task_stages.build(new_model)
        self.optimizer = keras.optimizers.Adam(1e-3, name="adam")
        self.task_stages.build_optimizer(self.optimizer, self.model)
        joint = None if self.task_stages.whole else self.task_stages.joint(60.0)
        parts = (self.model, self.optimizer, tf.Variable(0, trainable=False, dtype=tf.int64))
        self.checkpoint = CheckpointManager(*parts, folder, keep=2, writes=task == 0, joint=joint)

    @property
    def values(self) -> dict[str, bytes]:
        variables = [*self.model.variables, *self.optimizer.variables]
        return {each.path: each.numpy().tobytes() for each in variables if each.value.is_initialized()}

    def change(self) -> None:
        for each in (*self.model.trainable_variables, *self.optimizer._momentums):
            if each.value.is_initialized():
                each.assign(np.random.default_rng(len(each.path)).normal(size=each.shape))


def held(holders: list[Holder]) -> dict[str, bytes]:
    return {path: value for holder in holders for path, value in holder.values.items()}


def save(holders: list[Holder], step: int) -> None:
    for holder in holders:
        holder.checkpoint.save(step)
    for holder in holders:
        holder.checkpoint.wait()


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_each_task_holds_its_stage_with_the_first_values_of_one_device(tmp_path, stages):
    whole = Holder(tmp_path, 0, 1)
    holders = [Holder(tmp_path, task, stages) for task in range(stages)]
    assert held(holders) == whole.values
    assert (whole.model.trainable_variables[-1].numpy() == 0.25).all()
    for holder in holders:
        own = holder.task_stages.models[holder.task_stages.task].model.trainable_variables
        weights = [each for each in holder.model.trainable_variables if each.value.is_initialized()]
        assert [each.path for each in own] == [each.path for each in weights]
        slots = [each for each in holder.optimizer._momentums if each.value.is_initialized()]
        assert len(slots) == len(own) < len(holder.model.trainable_variables)


class Around(keras.layers.Layer):
    """Its `call` builds another layer."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(4, kernel_initializer=draw)
        self.scale = self.add_weight(shape=[4], initializer=draw)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.layer(inputs) * self.scale


def of_tuple(shape: tuple[int, ...], dtype: str) -> tf.Tensor:
    return tf.random.normal((2, *shape) if isinstance(shape, tuple) else [], dtype=dtype)[0]


@pytest.mark.parametrize(
    "new_layer", [lambda: keras.layers.Dense(4, kernel_initializer=keras.random.normal), lambda: Around(of_tuple)]
)
def test_initializers_that_share_a_generator_draw_as_on_one_device(monkeypatch, new_layer):
    def drawing() -> keras.Model:
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((4,)), *(new_layer() for _ in range(3))])

    patches.apply()
    monkeypatch.setattr(placed_seeds, "_unseeded", [keras.random.SeedGenerator(1)])  # as in a task
    expected, cluster = drawing(), spec.build(workers=1, strategy="pipeline", pipelines=1, devices=1)
    tasks = [TaskStages(cluster, task, CONFIG, None).build(drawing) for task in cluster.tasks]
    for weight, *built in zip(expected.weights, *(model.weights for model in tasks), strict=True):
        (value,) = (each for each in built if each.value.is_initialized())
        np.testing.assert_array_equal(weight, value)


@pytest.mark.extended
def test_equal_stages_of_two_pipelines_hold_the_same_and_one_of_them_writes(tmp_path):
    first, second = (Holder(tmp_path, task, 2, 2) for task in (1, 3))
    assert first.values == second.values
    assert (0, 1) == (first.task_stages.pipeline, second.task_stages.pipeline)
    assert [True, False] == [each.task_stages.joint(60.0).writes for each in (first, second)]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 2)])
def test_a_checkpoint_of_some_stages_is_restored_by_another_number(tmp_path, before, after):
    holders = [Holder(tmp_path, task, before) for task in range(before)]
    for holder in holders:
        holder.change()
    save(holders, 7)
    restored = [Holder(tmp_path, task, after) for task in range(after)]
    assert [7] * after == [holder.checkpoint.restore(lambda step: [step]) for holder in restored]
    assert held(holders) == held(restored)
    assert all(len(holder.values) < len(held(holders)) for holder in restored if after > 1)
    assert not list(tmp_path.glob(".ckpt-*"))  # nothing is left of what was joined


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, dict[str, bytes]]:
    """The checkpoint of two stages, and the values of all variables."""
    folder = tmp_path_factory.mktemp("saved")
    holders = [Holder(folder, task, 2) for task in range(2)]
    for holder in holders:
        holder.change()
    save(holders, 7)
    return str(folder / "ckpt-7"), held(holders)


@pytest.mark.slow
def test_a_model_restored_without_first_values_is_the_whole_model(tmp_path, saved):
    prefix, values = saved
    model = to_restore(new_model)
    assert not any(variable.value.is_initialized() for variable in model.variables)
    saved_weights.load_trained(model, prefix)
    assert all(values[each.path] == each.numpy().tobytes() for each in model.trainable_variables)
    export.export(model, tmp_path / "export", (6,), ())
    tokens_BT = np.arange(12, dtype=np.int32).reshape(2, 6) % 11
    served = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(model(tokens_BT), served.serve(tokens_BT), rtol=1e-5)


def test_a_compiled_model_is_built_without_memory_and_exported(tmp_path):
    def compiled() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    patches.apply()
    with keras.StatelessScope(), pytest.raises(ValueError, match="stateless scope"):  # by Keras itself
        compiled()
    whole, restored = compiled(), to_restore(compiled)
    assert not any(weight.value.is_initialized() for weight in restored.weights)
    saved_weights.load_trained(restored, tf.train.Checkpoint(**trees.parts_of_model(whole)).write(tmp_path / "saved"))
    export.export(restored, tmp_path / "export", (4,), ())
    served = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(whole(tf.ones([2, 4])), served.serve(tf.ones([2, 4])), rtol=1e-5)


def test_of_a_file_each_task_takes_the_weights_of_its_stage(tmp_path):
    first, second = (Holder(tmp_path, task, 2) for task in range(2))
    arrays = {name: np.full(one.shape, 0.5, np.float32) for one, name in initial_weights.list_weights(first.model)}
    np.savez(tmp_path / "weights.npz", **arrays)
    for holder in (first, second):
        initial_weights.load_file(holder.model, tmp_path / "weights.npz")
        own = holder.task_stages.models[holder.task_stages.task].model.trainable_variables
        assert all((each.numpy() == 0.5).all() for each in own)


@pytest.mark.slow
@pytest.mark.parametrize("writes", [True, False])
def test_a_stage_that_is_not_finite_or_cannot_write_keeps_all_from_saving(tmp_path, monkeypatch, writes):
    holders = [Holder(tmp_path, task, 2) for task in range(2)]
    if writes:
        weight = holders[1].task_stages.models[1].model.trainable_variables[0]
        weight.assign(np.full(weight.shape, np.nan))
    else:
        monkeypatch.setattr(tf.raw_ops, "SaveV2", Mock(side_effect=RunFailed("the disk is full")))
    for holder in holders:
        holder.checkpoint.save(3)
    for holder in holders:
        with pytest.raises(RunFailed, match="not finite" if writes else "the disk is full"):
            holder.checkpoint.wait()
    assert not list(tmp_path.glob("ckpt-*.json"))


def test_a_regularizer_of_a_variable_of_several_stages_counts_once() -> None:
    def shared() -> keras.Model:
        twice, inputs = keras.layers.Dense(4, kernel_regularizer="l2"), keras.Input((4,))
        middle = keras.layers.Dense(4, name="middle")(keras.layers.Dense(4)(twice(inputs)))
        return keras.Model(inputs, keras.layers.Dense(2)(twice(middle)))

    cluster = spec.build(workers=0, devices=2, strategy="pipeline")
    cut = dataclasses.replace(CONFIG, pipeline=dataclasses.replace(CONFIG.pipeline, cut="middle"))
    task_stages = TaskStages(cluster, cluster.tasks[0], cut, None)
    task_stages.device = lambda stage: None  # type: ignore[method-assign]  # this process has one device
    whole = task_stages.build(shared)
    assert {0, 1} == {stage for variable, stages in task_stages.shared if variable.regularizer for stage in stages}
    first, second = (stage.penalty() for stage in task_stages.models)
    assert float(whole.losses[0]) == first > 0
    assert second == 0
