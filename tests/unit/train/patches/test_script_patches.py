"""The patches for scripts: patched, `Model.fit` of Keras 3 on two tasks gives the numbers of one process."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.measured import measured, measured_by_two
from train.patches import shared_orders

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    return [*measured_by_two("fit_of_keras", tmp_path_factory.mktemp("patches")), measured("fit_of_keras")]


def same(one: Any, other: Any, names: tuple[str, ...] = ("loss", "accuracy")) -> None:
    """Check two trainings: the losses and metrics of their epochs, and their weights."""
    for name in names:
        np.testing.assert_allclose(one["history"][name], other["history"][name], rtol=1e-6, atol=1e-6)
    for weight, expected in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)


def test_every_script_patch_must_still_be_needed(found):
    """https://github.com/keras-team/keras/issues/20585

    Once this fails, Keras or TensorFlow has fixed it: remove the patch from `train/patches/`.
    """
    for task in found[:2]:
        assert task["error"].startswith("ValueError"), task["error"]
        assert "PerReplica" in task["error"]
    tensorflow = ["_apply_debug_options"]
    fit = ["_maybe_symbolic_build", "reduce_per_replica", "_make_function"]
    layers = ["add_weight", "Layer.losses", "next", "global_seed_generator"]
    layers += ["_trackable_children", "_lock_state", "_moments", "_clip_gradients", "apply"]
    layers += ["reduce_values", "unscale_loss_for_distribution"]
    callbacks = ["on_train_begin", "_save_model", "on_train_end", "_save_model", "__float__", "__int__"]
    datasets = ["__init__", "_convert", *["get_tf_dataset"] * 3]
    for task in found:
        assert ([*tensorflow, *fit, *layers, *callbacks, *datasets], []) == (task["replaced"], task["again"])


def test_training_with_validation_and_callbacks_must_be_that_of_one_process(found):
    first, second, alone = (task["callbacks"]["whole"] for task in found)
    assert first == second
    same(first, alone, ("loss", "accuracy", "val_loss", "val_accuracy"))


def test_a_training_that_continues_from_a_backup_must_end_with_the_same_bits_and_the_next_start_over(found):
    for task in found:
        whole, resumed = task["callbacks"]["whole"], task["callbacks"]["resumed"]
        assert [2, 3] == resumed["epochs"]  # it was interrupted before the third
        assert whole["weights"] == resumed["weights"]
        assert [0] == resumed["later"]


def test_the_chief_alone_must_write_what_callbacks_save(found):
    chief, worker, alone = (task["callbacks"] for task in found)
    assert 0 < worker["saved"] == chief["saved"] == alone["saved"]
    assert [] == worker["shared"]
    epochs = [f"epoch-{epoch}.weights.h5" for epoch in (1, 2, 3, 4)]
    assert ["best.keras", *epochs, "events", "interrupted"] == chief["left"] == alone["left"]


@pytest.mark.parametrize("what", ["sample_weights", "class_weights", "outside"])
def test_weights_of_examples_and_parts_made_outside_of_the_scope_must_count_as_in_one_process(found, what):
    first, second, alone = (task[what] for task in found)
    assert first == second
    same(first, alone, tuple(alone["history"]))


def test_several_steps_of_one_execution_must_be_the_same_steps(found):
    """Five batches, two at a time: the last execution has one."""
    for task in found:
        assert task["sample_weights"] == task["execution"]


def test_a_model_with_a_train_step_and_no_call_must_train_as_in_one_process(found):
    first, second, alone = found
    assert first["without_call"] == second["without_call"]
    for weight, expected in zip(first["without_call"], alone["without_call"], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
    assert "Autoencoder" in first["unbuilt"]


def test_evaluation_and_prediction_must_be_those_of_one_process(found):
    first, second, alone = found
    assert (first["evaluate"], first["predict"]) == (second["evaluate"], second["predict"])
    np.testing.assert_allclose(first["evaluate"], alone["evaluate"], rtol=1e-6)
    np.testing.assert_allclose(first["predict"], alone["predict"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["gradient_accumulation_steps", "ema_overwrite_frequency"])
def test_updates_in_some_steps_only_must_be_refused_with_the_name_of_the_option(found, option):
    for task in found[:2]:
        assert [f"ValueError: Keras 3 cannot use the optimizer's {option} on several replicas: leave it out"] * 2 == (
            task[option]
        )
        assert task["evaluate"] == task["evaluated"]  # which updates nothing


@pytest.mark.parametrize("what", ["generated", "streamed", "none", "yielded"])
def test_generators_and_weights_that_are_none_must_count_as_a_dataset(found, what):
    np.testing.assert_allclose([task[what] for task in found], [task["evaluate"] for task in found], rtol=1e-6)


def test_an_epoch_of_shuffled_arrays_must_have_every_example_once(found):
    np.testing.assert_allclose([task["visits"] for task in found[:2]], 1)


def test_a_dataset_that_each_task_shuffles_in_another_order_is_known(monkeypatch):
    monkeypatch.setattr(shared_orders.context.context(), "_seed", None)
    numbers, lines = tf.data.Dataset.range(4), tf.data.TextLineDataset("file")
    datasets = (numbers.shuffle(4).batch(2), numbers.shuffle(4, seed=1), lines.shuffle(4), numbers)
    assert [True, False, False, False] == [shared_orders.draws_alone(dataset) for dataset in datasets]


@pytest.mark.parametrize(("what", "expected"), [("numbers", [np.float32(0.05), 0]), ("kept", True)])
def test_numbers_and_arrays_of_a_script_must_be_those_of_one_process(found, what, expected):
    assert [expected] * 3 == [task[what] for task in found]


def test_datasets_that_are_not_shared_must_be_used_to_their_end(found):
    first, second, alone = found
    assert first["unshared"] == second["unshared"]
    np.testing.assert_allclose(first["unshared"], alone["evaluate"], rtol=1e-6)
    assert first["longer"] == second["longer"]
    assert [0, 1, 2] == first["counted"]["epochs"]  # of the steps that the user has chosen
    assert first["counted"] == second["counted"]


def test_replicas_must_draw_different_masks(found):
    assert found[0]["drawn"] != found[1]["drawn"]
    assert len({*map(tuple, (*found[0]["unseeded"], *found[1]["unseeded"]))}) == 4
    for task in found[:2]:
        assert {0.0, 2.0} == set(task["drawn"])


def test_moving_averages_must_be_those_of_all_replicas(found):
    assert [0.5, 0.5] == [task["averages"][0] for task in found[:2]]


def test_a_replica_without_examples_must_not_spoil_the_averages(found):
    assert [0.25, 0.25] == [task["averages"][1] for task in found[:2]]


@pytest.mark.parametrize("what", ["number", "unreduced"])
def test_a_loss_that_is_one_number_must_train_as_in_one_process(found, what):
    for task in found[:2]:
        np.testing.assert_allclose(task[what], found[2][what], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["clipped", "scaled"])
def test_gradients_must_be_clipped_and_checked_as_in_one_process(found, what):
    first, second, alone = (task[what] for task in found)
    assert first["weights"] == second["weights"]
    same(first, alone, ())
