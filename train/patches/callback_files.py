"""BackupAndRestore and ModelCheckpoint write files on the chief only, as with Keras 2.

Defect: on several tasks, all of them write the same files.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_the_chief_alone_must_write_what_callbacks_save
Not applied: to a task that trains alone.

The other tasks write to a temporary folder that is deleted at once, because reading some variables is a collective
operation. Nothing here waits for a collective: a script may give a callback to its chief alone.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

DELETED_S = 60.0
"""Longest time a task waits for the chief to delete a backup that it could otherwise restore again."""
_PATHS = (
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


def apply() -> list[str]:
    """Patch both callbacks."""
    backup, checkpoint = keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint
    replaced = []
    if not hasattr(backup, "_unpatched"):
        backup._unpatched = {name: getattr(backup, name) for name in ("on_train_begin", "_save_model", "on_train_end")}
        backup.on_train_begin, backup._save_model, backup.on_train_end = _begin, _back_up, _end
        replaced.append("BackupAndRestore")
    if not hasattr(checkpoint, "_unpatched"):
        checkpoint._unpatched = {"_save_model": checkpoint._save_model}
        checkpoint._save_model = _save
        replaced.append("ModelCheckpoint")
    return replaced


def _is_chief(model: Any) -> bool | None:
    """Whether this task is the chief of several; None if it trains alone."""
    strategy = getattr(model, "_distribute_strategy", None)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    extended = strategy.extended
    return bool(extended.should_checkpoint) if extended._in_multi_worker_mode() else None


def _in_task_folder(path: str) -> Path | None:
    """Return a path relative to the working folder of this task of a run; None if it is outside."""
    if not {"RUN_DIR", "TASK"} <= os.environ.keys() or "://" in path:
        return None
    folder = Path(os.environ["RUN_DIR"], "work", os.environ["TASK"]).resolve()
    absolute = Path(path).resolve()
    return absolute.relative_to(folder) if absolute.is_relative_to(folder) else None


def _begin(backup: Any, logs: Any = None) -> None:
    """Restore the chief's backup, even if the path is in each task's working folder."""
    backup.backup_dir = os.fspath(backup.backup_dir)
    path = _in_task_folder(backup.backup_dir)
    if _is_chief(backup.model) is False and path is not None:
        _move(backup, str(Path(os.environ["RUN_DIR"], "work", "chief", path)))
    backup._unpatched["on_train_begin"](backup, logs)


def _back_up(backup: Any) -> None:
    """Write the backup on the chief, so that it is complete whenever the chief is killed."""
    original, chief = backup._unpatched["_save_model"], _is_chief(backup.model)
    if chief is None or (chief and (backup.double_checkpoint or "://" in backup.backup_dir)):
        original(backup)
        return
    target = Path(backup.backup_dir)
    if chief:
        target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent if chief else None) as folder:
        paths = {name: getattr(backup, name) for name in ("backup_dir", *_PATHS)}
        _move(backup, folder)
        try:
            original(backup)
        finally:
            vars(backup).update(paths)
        if chief:
            target.mkdir(exist_ok=True)
            for path in ("_weights_path", "_training_metadata_path"):
                os.replace(Path(folder, Path(paths[path]).name), paths[path])


def _end(backup: Any, logs: Any = None) -> None:
    """Delete the backup on the chief; the others wait for it, so that the next `fit` starts alike on all tasks."""
    backup.model._initial_epoch = None  # Keras would skip as many epochs of the next `fit`, too
    if _is_chief(backup.model) is not False:
        backup._unpatched["on_train_end"](backup, logs)
        return
    until = time.monotonic() + DELETED_S
    while backup.delete_checkpoint and Path(backup.backup_dir).exists() and time.monotonic() < until:
        time.sleep(0.02)


def _move(backup: Any, folder: str) -> None:
    backup.backup_dir = folder
    for name in _PATHS:
        setattr(backup, name, str(Path(folder, Path(getattr(backup, name)).name)))


def _save(checkpoint: Any, epoch: int, batch: int | None, logs: Any) -> None:
    """Save the model on the chief, and on other tasks if the path is in their working folder or has their name."""
    path, task = checkpoint.filepath, os.environ.get("TASK", "")
    own = (task and task in path) or _in_task_folder(path) is not None
    elsewhere = _is_chief(checkpoint.model) is False and not own
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if elsewhere else contextlib.nullcontext() as folder:
        checkpoint.filepath = str(Path(folder, Path(path).name)) if folder else path
        try:
            checkpoint._unpatched["_save_model"](checkpoint, epoch, batch, logs)
        finally:
            checkpoint.filepath = path
