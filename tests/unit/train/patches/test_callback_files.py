"""Backups and saved models of several tasks; without a cluster, the chief and another task take turns."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from train import patches
from train.patches import callback_files


@pytest.fixture(autouse=True)
def be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    patches.apply(["callback_files"])
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(callback_files, "BEGUN_S", 0.0)

    def chief(part: bool) -> None:
        monkeypatch.setattr(callback_files, "_is_chief", lambda model: part)
        monkeypatch.setattr(callback_files, "_begun", itertools.count())  # as in another process

    chief(True)
    return chief


def new_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model


def fit(folder: Path, epochs: int = 4) -> list[np.ndarray]:
    model, backup = new_model(), keras.callbacks.BackupAndRestore(folder, delete_checkpoint=epochs == 4)
    model.fit(np.ones((16, 4)), np.ones(16), batch_size=8, epochs=epochs, verbose=0, callbacks=[backup])
    return model.get_weights()


def first_epoch(folder: Path) -> int | None:
    backup = keras.callbacks.BackupAndRestore(folder)
    backup.set_model(new_model())
    backup.on_train_begin()
    return backup.model._initial_epoch


def test_every_task_must_continue_from_the_backup_of_the_chief_or_fail(tmp_path, be):
    fit(tmp_path / "of-chief", epochs=2)
    for chief in (True, False):
        be(chief)
        assert 2 == first_epoch(tmp_path / ("of-chief" if chief else "of-worker"))
    with pytest.raises(RuntimeError):  # the chief has begun once
        first_epoch(tmp_path / "of-worker")
    be(False)
    (tmp_path / "of-chief").rename(tmp_path / "on-another-machine")
    with pytest.raises(RuntimeError):
        first_epoch(tmp_path / "of-chief")


def test_a_backup_in_another_file_system_must_have_the_next_masks_and_be_deleted(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (tmp_path / "backup").symlink_to(folder)
        fit(tmp_path / "backup", epochs=2)
        np.testing.assert_equal(fit(tmp_path / "backup"), fit(tmp_path / "whole"))
        assert [] == list(Path(folder).iterdir())


def test_a_saved_model_must_be_whole_while_the_chief_writes_the_next(tmp_path):
    path, model, found = tmp_path / "best.weights.h5", new_model(), []
    path.write_text("whole")
    model.save_weights = lambda new, **_: Path(new).write_text("next") and found.append(path.read_text())
    saves = keras.callbacks.ModelCheckpoint(str(path), save_weights_only=True)
    saves.set_model(model)
    saves.on_epoch_end(0, {})
    assert (["whole"], "next") == (found, path.read_text())
