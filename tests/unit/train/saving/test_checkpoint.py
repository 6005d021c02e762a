"""Checkpoints: written atomically and concurrently with the training, checked before use."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.recovery import checkpoint_files, snapshot_files
from cluster.contract.recovery.checkpoint_files import list_finished
from cluster.system.errors import RunFailed, UsageError
from train.model.gradients import FIRST_SCALE, LossScale
from train.saving import saved_weights
from train.saving.checkpoint import CheckpointManager
from train.saving.snapshots import NONE, MemorySnapshots

Parts = tuple[keras.Model, keras.optimizers.Optimizer, tf.Variable]


def parts(seed: int = 0, rate: float | None = 0.001) -> Parts:
    """Return a model with moving averages and a random layer, its optimizer and a step."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5)])
    optimizer = keras.optimizers.Adam(rate or keras.optimizers.schedules.CosineDecay(0.3, 100))
    optimizer.build(model.trainable_variables)
    return model, optimizer, tf.Variable(0, dtype=tf.int64)


class Blocks(keras.layers.Layer):
    """Has layers and a variable in lists and dictionaries, where TensorFlow does not look for them."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.blocks = [layers.Dense(4), {"normalize": layers.BatchNormalization()}]
        self.frozen = {"dense": layers.Dense(4, trainable=False)}
        self.counts = [tf.Variable(0.0, trainable=False)]

    def call(self, inputs: Any) -> Any:
        outputs = self.blocks[1]["normalize"](self.blocks[0](inputs))
        return self.frozen["dense"](outputs) * (1 + self.counts[0])


def saving(folder: Path, own: Parts, **options: Any) -> CheckpointManager:
    return CheckpointManager(*own, folder, **{"keep": 3, "writes": True} | options)


@pytest.fixture
def three(tmp_path) -> Parts:
    """A training that saved after 1, 2 and 3 steps, its weights those numbers."""
    own = parts()
    saves = saving(tmp_path, own)
    for step in (1, 2, 3):
        own[0].set_weights([np.full(weight.shape, step, weight.dtype) for weight in own[0].get_weights()])
        saves.save(step)
    saves.wait()
    return own


def test_the_newest_is_restored_with_all_of_its_state(tmp_path, three):
    other, scale = parts(seed=1), LossScale()
    assert 3 == saving(tmp_path, other, writes=False, loss_scale=scale).restore()
    assert FIRST_SCALE == scale.metrics()["loss_scale"]  # in a training that becomes one in float16
    for mine, theirs in zip(three[0].get_weights(), other[0].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(three[1].variables, other[1].variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_variables_in_lists_and_dictionaries_are_restored(tmp_path):
    def new() -> tuple[Parts, Blocks]:
        blocks = Blocks()
        model = keras.Sequential([keras.Input((4,)), blocks, keras.layers.Dense(2)])
        model.own_optimizers = {"first": keras.optimizers.Adam()}
        model.own_optimizers["first"].build(model.trainable_variables)
        return (model, keras.optimizers.Adam(), tf.Variable(0, dtype=tf.int64)), blocks

    own, blocks = new()
    own[0].set_weights([np.random.default_rng(0).normal(size=weight.shape) for weight in own[0].get_weights()])
    blocks.counts[0].assign(3.0)
    for variable in own[0].own_optimizers["first"].variables:
        variable.assign(variable + 4)
    saves = saving(tmp_path, own)
    saves.save(1)
    saves.wait()
    resumed, evaluated, in_half = new(), new(), new()
    assert 1 == saving(tmp_path, resumed[0]).restore()
    saved_weights.load_trained(evaluated[0][0], str(tmp_path / "ckpt-1"))
    saved_weights.load_trained(in_half[0][0], str(tmp_path / "ckpt-1"), as_trained=new()[0][0])
    for variable in resumed[0][0].own_optimizers["first"].variables[2:]:
        np.testing.assert_array_equal(variable, np.full(variable.shape, 4))
    for (model, *_), restored in (resumed, evaluated, in_half):
        assert restored.counts[0].numpy() == 3.0
        for mine, theirs in zip(own[0].get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("damage", "other_reads", "restored"),
    [(Path.stat, 3, 3), (Path.unlink, 3, 2), (Path.stat, 1, 2), (Path.stat, NONE, 2)],
)
def test_only_a_checkpoint_that_every_task_can_read_replaces_a_snapshot(tmp_path, damage, other_reads, restored):
    def gather(number: int) -> list[int]:
        return [number, other_reads if number == 3 else number]

    files = snapshot_files.descriptors({snapshot_files.VARIABLE: snapshot_files.create()})
    before, after = (saving(tmp_path, parts(seed)) for seed in (1, 2))
    before.keep_snapshot(2, MemorySnapshots(files, before.tree, gather, None))
    damage(tmp_path / "ckpt-3.index")
    assert restored == after.restore(gather, MemorySnapshots(files, after.tree, gather, None))
    source, newest = "checkpoint" if restored == 3 else "memory", list_finished(tmp_path)[0].step
    assert (source, restored) == (after.restored_from, newest)  # a newer one is set aside


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("changed", [[3, 3], [5]])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, changed):
    model = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, changed), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    with pytest.raises(UsageError, match="of another model: "):
        saved_weights.load_trained(model, str(tmp_path / "ckpt-3"))
    with pytest.raises(UsageError, match="--init-from"):
        saving(tmp_path, (model, optimizer, tf.Variable(0, dtype=tf.int64))).restore()


def test_a_loss_scale_is_restored_and_optional(tmp_path):
    """A run may be resumed in another precision."""
    own, scale = parts(), LossScale()
    scale.scale.assign(4.0)
    scale.skipped_steps.assign(3)
    saves = saving(tmp_path, own, loss_scale=scale)
    saves.save(1)
    saves.wait()
    again = LossScale()
    assert 1 == saving(tmp_path, parts(1), loss_scale=again).restore()
    assert {"loss_scale": 4.0, "skipped_steps": 3} == again.metrics()
    other = parts(2)
    assert 1 == saving(tmp_path, other).restore()
    np.testing.assert_array_equal(own[0].get_weights()[0], other[0].get_weights()[0])


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.1, None), (None, 0.2), (None, None)])
def test_a_run_is_resumed_with_a_schedule_or_a_rate_that_callbacks_set(tmp_path, rates):
    """Only the latter is a variable of the optimizer."""
    before, after = parts(rate=rates[0]), parts(1, rate=rates[1])
    before[1].variables[-1].assign(tf.ones_like(before[1].variables[-1]))
    saves = saving(tmp_path, before)
    saves.save(1)
    saves.wait()
    assert 1 == saving(tmp_path, after).restore()
    assert 1.0 == after[1].variables[-1].numpy().max()
    rate = rates[0] if all(rates) else rates[1] or 0.3
    assert rate == pytest.approx(float(tf.convert_to_tensor(after[1].learning_rate)), rel=0.01)


@pytest.mark.usefixtures("three")
def test_all_restore_what_is_good_for_all_and_the_writer_sets_aside_what_is_newer(tmp_path):
    others = iter([[3, 1], [1, 1]] * 2)  # another task cannot read what is newer than 1
    for writes, left in ((False, [3, 2, 1]), (True, [1])):
        own = parts(seed=1)
        assert 1 == saving(tmp_path, own, writes=writes).restore(lambda _step: next(others))
        assert {1.0} == set(own[0].get_weights()[0].flatten())
        assert left == [saved.step for saved in list_finished(tmp_path)]
    assert [3, 2] == [saved.step for saved in list_finished(tmp_path / "aside")]


@pytest.mark.usefixtures("three")
def test_leftovers_of_a_killed_save_are_deleted_when_the_writer_starts(tmp_path):
    (tmp_path / ".ckpt-0-abc").mkdir()
    (tmp_path / "ckpt-9.index").touch()
    saving(tmp_path, parts(), writes=False).restore()
    assert (tmp_path / ".ckpt-0-abc").exists()
    saving(tmp_path, parts(), generation=1).restore()
    assert 9 == len(list(tmp_path.iterdir()))


def test_a_task_that_does_not_write_leaves_nothing(tmp_path):
    saves = saving(tmp_path, parts(), writes=False)
    saves.save(1)
    saves.wait()
    assert [] == list(tmp_path.iterdir())


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    go, write = threading.Event(), checkpoint_files.write_checkpoint
    monkeypatch.setattr(checkpoint_files, "write_checkpoint", lambda *given: (go.wait(20), write(*given)))
    own, saved = parts(), list[int]()
    saves = saving(tmp_path, own, saved=saved.append)
    before = own[0].get_weights()
    saves.save(7)
    own[0].set_weights([weight + 1 for weight in before])  # the next step
    assert [] == saved
    go.set()
    saves.wait()
    assert [7] == saved
    other = parts(seed=1)
    assert 7 == saving(tmp_path, other, writes=False).restore()
    np.testing.assert_array_equal(before[0], other[0].get_weights()[0])


def test_a_save_that_failed_is_reported_by_the_next(tmp_path):
    saves = saving(tmp_path / "absent", parts())
    saves.save(1)
    with pytest.raises(FileNotFoundError):
        saves.save(2)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named_and_not_saved(tmp_path, three, broken):
    """With oneDNN's kernels the loss can stay finite over them."""
    three[0].layers[0].bias.assign([0.0, broken, 0.0])
    saves = saving(tmp_path, three)
    saves.save(4)
    with pytest.raises(RunFailed, match=r"bias is not finite after step 4; lower --optimizer.learning-rate"):
        saves.wait()
    assert [3, 2, 1] == [saved.step for saved in list_finished(tmp_path)]
