"""BackupAndRestore and ModelCheckpoint write files on the chief only, as with Keras 2.

Defect: on several tasks, all of them write the same files.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_the_chief_alone_must_write_what_callbacks_save
Not applied: to a task that trains alone, except that its backups have the states of random layers, too.

The other tasks write to a temporary folder that is deleted at once, because reading some variables is a collective
operation. Nothing here waits for a collective: a script may give a callback to its chief alone.
"""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

BEGUN_S = 600.0
"""Longest time a task waits for the chief to name the folder of its backup."""
SEEN_S = 75.0
"""How long a network file system may hide the chief's backup: the default `acdirmax` of nfs(5) is a minute."""
DELETED_S = 60.0
"""Longest time a task waits for the chief to delete a backup that it could otherwise restore again."""
_PATHS = ("_weights_path", "_training_metadata_path", "_prev_weights_path", "_prev_training_metadata_path")
_begun = itertools.count()
"""Numbers the trainings with a backup; every task has the same."""

_keras_begin = keras.callbacks.BackupAndRestore.on_train_begin
_keras_back_up = keras.callbacks.BackupAndRestore._save_model
_keras_end = keras.callbacks.BackupAndRestore.on_train_end
_keras_save = keras.callbacks.ModelCheckpoint._save_model


def _is_chief(model: Any) -> bool | None:
    """Whether this task is the chief of several; None if it trains alone."""
    strategy = getattr(model, "_distribute_strategy", None)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    extended = strategy.extended
    return bool(extended.should_checkpoint) if extended._in_multi_worker_mode() else None


def _is_of_task(path: str) -> bool:
    """Whether a path has the name of this task of a run, or is in its working folder or its temporary one."""
    task, run, temporary = (os.environ.get(name) for name in ("TASK", "RUN_DIR", "TMPDIR"))
    if task and task in path:
        return True
    folders = [Path(run, "work", task), Path(temporary)] if task and run and temporary and "://" not in path else []
    return any(Path(path).resolve().is_relative_to(folder.resolve()) for folder in folders)


def _begin(backup: Any, logs: Any = None) -> None:
    """Restore the chief's backup, even if each task has given another path."""
    backup.backup_dir = os.fspath(backup.backup_dir)
    chief = _is_chief(backup.model)
    if chief is not None and "RUN_DIR" in os.environ and "://" not in backup.backup_dir:
        _use_folder_of_chief(backup, chief)
    _keras_begin(backup, logs)
    seeds, states = json.loads(_state(backup) or "{}").get("seeds", []), _seed_states(backup.model)
    for state, seed in zip(states, seeds, strict=False):
        state.assign(seed)


def _use_folder_of_chief(backup: Any, chief: bool) -> None:
    attempt = f"{os.environ.get('GENERATION', '')}-{next(_begun)}"
    named = Path(os.environ["RUN_DIR"], "work", "chief", f".backup-{attempt}.json")
    if chief:
        named.parent.mkdir(parents=True, exist_ok=True)
        new = named.with_suffix(".new")
        new.write_text(json.dumps([str(Path(backup.backup_dir).resolve()), _state(backup)]))
        new.replace(named)
        return
    if not _wait_until(named.exists, BEGUN_S):
        raise RuntimeError(f"the chief began no BackupAndRestore in {BEGUN_S:g} s; give the callback to every task")
    folder, state = json.loads(named.read_text())
    _move(backup, folder)
    if not _wait_until(lambda: _state(backup) == state, SEEN_S):
        raise RuntimeError(f"this task does not see the chief's backup in {folder}; use a folder in RUN_DIR")


def _state(backup: Any) -> str:
    """Return the text that says which epoch the backup is of; nothing without a backup."""
    path = Path(backup._training_metadata_path)
    return path.read_text() if path.exists() else ""


def _seed_states(model: Any) -> list[Any]:
    """Return the states of the seed generators of layers, which Keras does not save with the weights."""
    weights = {id(weight) for weight in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def _back_up(backup: Any) -> None:
    """Write the backup on the chief, so that it is complete whenever the chief is killed."""
    writes = _is_chief(backup.model) is not False
    if writes and (backup.double_checkpoint or "://" in backup.backup_dir):
        _keras_back_up(backup)
        return
    target = Path(backup.backup_dir)
    if writes:
        target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target if writes else None) as folder:
        paths = {name: getattr(backup, name) for name in ("backup_dir", *_PATHS)}
        _move(backup, folder)
        try:
            _keras_back_up(backup)
        finally:
            vars(backup).update(paths)
        if writes:
            metadata = Path(folder, Path(paths["_training_metadata_path"]).name)
            seeds = [state.numpy().tolist() for state in _seed_states(backup.model)]
            metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"seeds": seeds}))
            for path in ("_weights_path", "_training_metadata_path"):
                os.replace(Path(folder, Path(paths[path]).name), paths[path])


def _end(backup: Any, logs: Any = None) -> None:
    """Delete the backup on the chief; the others wait for it, so that the next `fit` starts alike on all tasks."""
    backup.model._initial_epoch = None  # Keras would skip as many epochs of the next `fit`, too
    if _is_chief(backup.model) is not False:
        folder = Path(backup.backup_dir)
        if folder.is_symlink() or folder.is_mount():  # which cannot be deleted
            for path in folder.iterdir() if backup.delete_checkpoint else ():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            _keras_end(backup, logs)
        return
    if backup.delete_checkpoint:
        _wait_until(lambda: not any(Path(getattr(backup, name)).exists() for name in _PATHS), DELETED_S)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a condition becomes true; a script's process may have other modules of the name `cluster`."""
    until = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return value


def _move(backup: Any, folder: str) -> None:
    backup.backup_dir = folder
    for name in _PATHS:
        setattr(backup, name, str(Path(folder, Path(getattr(backup, name)).name)))


def _save(checkpoint: Any, epoch: int, batch: int | None, logs: Any) -> None:
    """Save the model on the chief, and on other tasks if the path is in one of their folders or has their name."""
    path, chief = checkpoint.filepath, _is_chief(checkpoint.model)
    if chief and "://" not in path:
        with _replacing_files(checkpoint):
            _keras_save(checkpoint, epoch, batch, logs)
        return
    elsewhere = chief is False and not _is_of_task(path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if elsewhere else contextlib.nullcontext() as folder:
        checkpoint.filepath = str(Path(folder, Path(path).name)) if folder else path
        try:
            _keras_save(checkpoint, epoch, batch, logs)
        finally:
            checkpoint.filepath = path


@contextlib.contextmanager
def _replacing_files(checkpoint: Any) -> Iterator[None]:
    """Write files next to those that they then replace, which other tasks may be reading."""
    model = checkpoint.model

    def replacing(save: Any) -> Any:
        def save_and_replace(path: str, **options: Any) -> None:
            new = Path(path).with_name(f".{Path(path).name}")
            save(str(new), **options)
            new.replace(path)

        return save_and_replace

    checkpoint._model = SimpleNamespace(save=replacing(model.save), save_weights=replacing(model.save_weights))
    try:
        yield
    finally:
        checkpoint._model = model


REPLACED: list[Any] = [
    (keras.callbacks.BackupAndRestore, "on_train_begin", _begin, {}),
    (keras.callbacks.BackupAndRestore, "_save_model", _back_up, {}),
    (keras.callbacks.BackupAndRestore, "on_train_end", _end, {}),
    (keras.callbacks.ModelCheckpoint, "_save_model", _save, {}),
]
