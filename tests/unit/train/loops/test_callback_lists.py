"""The list that the user's function of `--callbacks` returns is checked before the training begins."""

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import UsageError
from tests.support import own_module
from train import patches
from train.callbacks.callback_actions import build_callbacks
from train.config import Optimizer, TrainConfig
from train.model import optimizers
from train.patches import callback_files


@pytest.fixture
def own_parts(monkeypatch) -> Any:
    return own_module.put(monkeypatch, "own_parts")


@pytest.mark.parametrize(
    "made",
    [
        keras.callbacks.EarlyStopping,
        None,
        (keras.callbacks.TerminateOnNaN(),),
        [keras.callbacks.EarlyStopping],
        [keras.callbacks.TerminateOnNaN(), "early stopping"],
    ],
)
def test_an_invalid_list_of_callbacks_is_refused_in_one_line(made, own_parts):
    own_parts.callbacks = lambda run, task: made
    with pytest.raises(UsageError) as refused:
        build_callbacks(_as_far_as_build())
    assert str(refused.value).startswith("--callbacks 'own_parts:callbacks'")
    assert 1 == len(str(refused.value).splitlines())


def test_backups_are_left_to_checkpoints(own_parts, tmp_path, capsys):
    """They would restore older weights over those of the checkpoint."""
    kept = keras.callbacks.TerminateOnNaN()
    made = [keras.callbacks.BackupAndRestore(tmp_path / "backup"), kept]
    own_parts.callbacks = lambda run, task: made
    assert [kept] == build_callbacks(_as_far_as_build())
    assert "BackupAndRestore" in capsys.readouterr().out


@pytest.mark.parametrize(
    "swap",
    [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.EarlyStopping(restore_best_weights=True),
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
    ],
)
def test_evaluated_weights_are_chosen_by_the_averages_or_by_a_callback(own_parts, swap):
    own_parts.callbacks = lambda run, task: [swap]
    own_parts.optimizer = lambda rate: keras.optimizers.SGD(0.1, use_ema=True)
    own = Optimizer("own_parts:optimizer")
    for both_swap in (Optimizer(ema=0.9), own):
        with pytest.raises(UsageError, match=type(swap).__name__):
            build_callbacks(_as_far_as_build(both_swap))
    for one_swaps in (Optimizer(ema=0.9, ema_evaluate=False), replace(own, ema_evaluate=False), Optimizer()):
        assert [swap] == build_callbacks(_as_far_as_build(one_swaps))


@pytest.mark.parametrize(
    ("name", "writes"),
    [("best.weights.h5", False), ("worker-0.weights.h5", True), ("temporary/best.weights.h5", True)],
)
def test_a_worker_saves_models_only_to_separate_files(monkeypatch, tmp_path, name, writes):
    """Others are the chief's, which would write the same file at the same time."""
    patches.apply()
    for variable, value in (("TASK", "worker-0"), ("RUN_DIR", "run"), ("TMPDIR", "temporary")):
        monkeypatch.setenv(variable, value if variable == "TASK" else str(tmp_path / value))
    monkeypatch.setattr(callback_files, "_is_chief", lambda model: False)
    saves = keras.callbacks.ModelCheckpoint(str(tmp_path / name), save_weights_only=True)
    saves.set_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    saves.on_epoch_end(0, {})
    assert writes == (tmp_path / name).exists()


def _as_far_as_build(optimizer: Optimizer | None = None) -> Any:
    config = TrainConfig(callbacks="own_parts:callbacks", optimizer=optimizer or Optimizer())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.optimizer = optimizers.build_for_model(config, model)
    task = {"run": RunFolder(Path("run")), "task": types.SimpleNamespace(name="chief"), "chief": True}
    return types.SimpleNamespace(config=config, model=model, **task)
