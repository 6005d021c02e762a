"""Mends callbacks of Keras 3 that write files: on several tasks all of them would write the same ones.

The chief writes, as with Keras 2. The other tasks write to a temporary folder that is deleted at once, because reading
some variables takes all tasks. Nothing here waits for a collective: a script may give a callback to its chief alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

DELETED_S = 60.0
"""How long a task waits for the chief to delete a backup that it could otherwise restore again."""
_PATHS = (
    "backup_dir",
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


def apply() -> None:
    """Patch the callbacks. Idempotent."""
    backup, checkpoint = keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint
    if not hasattr(backup, "_of_one_task"):
        backup._of_one_task = {
            name: getattr(backup, name) for name in ("on_train_begin", "_save_model", "on_train_end")
        }
        backup.on_train_begin, backup._save_model, backup.on_train_end = _begin, _back_up, _end
    if not hasattr(checkpoint, "_of_one_task"):
        checkpoint._of_one_task = {"_save_model": checkpoint._save_model}
        checkpoint._save_model = _save


def _is_chief(model: Any) -> bool | None:
    """Whether this task is the chief of several; None: it trains alone."""
    strategy = getattr(model, "_distribute_strategy", None)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    extended = strategy.extended
    return bool(extended.should_checkpoint) if extended._in_multi_worker_mode() else None


def _in_own_folder(path: str) -> Path | None:
    """Return a path relative to the folder that this task of a run works in; None: it lies elsewhere."""
    if not {"RUN_DIR", "TASK"} <= os.environ.keys() or "://" in path:
        return None
    own = Path(os.environ["RUN_DIR"], "work", os.environ["TASK"]).resolve()
    whole = Path(path).resolve()
    return whole.relative_to(own) if whole.is_relative_to(own) else None


def _begin(backup: Any, logs: Any = None) -> None:
    """Restore what the chief backed up, where the path is one of each task's own folder, too."""
    own = _in_own_folder(backup.backup_dir)
    if _is_chief(backup.model) is False and own is not None:
        _move(backup, str(Path(os.environ["RUN_DIR"], "work", "chief", own)))
    backup._of_one_task["on_train_begin"](backup, logs)


def _back_up(backup: Any) -> None:
    """Write the backup, on the chief; it is complete whenever the chief is killed."""
    original, chief = backup._of_one_task["_save_model"], _is_chief(backup.model)
    if chief is None or (chief and (backup.double_checkpoint or "://" in backup.backup_dir)):
        original(backup)
        return
    target = Path(backup.backup_dir)
    if chief:
        target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent if chief else None) as folder:
        paths = {name: getattr(backup, name) for name in _PATHS}
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
    """Delete the backup, on the chief; the others wait for that, so that their next `fit` begins as the chief's."""
    if _is_chief(backup.model) is not False:
        backup._of_one_task["on_train_end"](backup, logs)
        return
    until = time.monotonic() + DELETED_S
    while backup.delete_checkpoint and Path(backup.backup_dir).exists() and time.monotonic() < until:
        time.sleep(0.02)


def _move(backup: Any, folder: str) -> None:
    """Set the folder of a backup."""
    old = backup.backup_dir
    for name in _PATHS:
        setattr(backup, name, folder + getattr(backup, name)[len(old) :])


def _save(checkpoint: Any, epoch: int, batch: int | None, logs: Any) -> None:
    """Save the model, on the chief, and on a task that does so in its own folder."""
    elsewhere = _is_chief(checkpoint.model) is False and _in_own_folder(checkpoint.filepath) is None
    with _temporary(checkpoint) if elsewhere else contextlib.nullcontext():
        checkpoint._of_one_task["_save_model"](checkpoint, epoch, batch, logs)


@contextlib.contextmanager
def _temporary(checkpoint: Any) -> Iterator[None]:
    path, folder = checkpoint.filepath, tempfile.mkdtemp()
    checkpoint.filepath = str(Path(folder, Path(path).name))
    try:
        yield
    finally:
        checkpoint.filepath = path
        shutil.rmtree(folder, ignore_errors=True)
