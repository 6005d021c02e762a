"""The state of callbacks in a checkpoint, so that a restart does not change when training stops.

The attributes of a callback that have changed since it was created are saved, as far as `plain_values.py` can encode
them. Everything else, such as open files, is recreated by each generation, with a warning.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorflow import keras

from train.callbacks import plain_values

_WITHOUT_STATE = {
    keras.callbacks.CSVLogger: ("append_header", "csv_file", "writer"),
    keras.callbacks.TensorBoard: ("_is_tracing", "_profiler_started", "_batch_trace_context", "_writers"),
}
"""Attributes of Keras's callbacks that belong to a process, not to the training."""


@dataclass
class CallbackProgress:
    """The state of callbacks in a checkpoint."""

    epoch: int = -1
    """Index of the current epoch; -1 before training."""
    steps: int = 0
    """Steps done in this epoch; 0 once callbacks were called for its end."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sum of each logged value over these steps."""
    epoch_logs: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    """Steps done at the newest evaluation."""
    ended_at: int = 0
    """Total steps of the training that a callback ended; 0 if none did."""
    callbacks: list[dict[str, bytes]] = field(default_factory=list)
    """The changed attributes of each callback, encoded."""
    classes: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Size of each CSVLogger's file in bytes; -1 for another callback or a missing file."""


def encode_attributes(callback: Any) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the encoded attributes of a callback, and the types of those that cannot be encoded."""
    encoded, lost = {}, {}
    skipped = {name for kind, names in _WITHOUT_STATE.items() if isinstance(callback, kind) for name in names}
    for name, value in plain_values.attributes_of(callback).items():
        if name in skipped:
            continue
        try:
            encoded[name] = plain_values.encode_value(value, in_place=True)
        except (TypeError, RecursionError):
            lost[name] = type(value).__name__
    return encoded, lost


def restore_attributes(callbacks: Sequence[Any], progress: CallbackProgress) -> list[str]:
    """Restore the attributes of callbacks; return the names of those that could not be restored."""
    lost = []
    for callback, values in zip(callbacks, progress.callbacks, strict=True):
        for name, encoded in values.items():
            try:
                setattr(callback, name, plain_values.decode_value(encoded, getattr(callback, name, None)))
            except ValueError:
                lost.append(f"{type(callback).__name__}.{name}")
    return lost


def size_of_file(callback: Any) -> int:
    """Return the size of a CSVLogger's file; -1 for another callback."""
    path = Path(callback.filename) if isinstance(callback, keras.callbacks.CSVLogger) else None
    return path.stat().st_size if path and path.is_file() else -1


@contextlib.contextmanager
def appending(callbacks: Sequence[Any], sizes: Sequence[int]) -> Iterator[None]:
    """Make each CSVLogger that is opened inside truncate its file to the saved size and append to it."""
    loggers = [(callback, size) for callback, size in zip(callbacks, sizes, strict=False) if size >= 0]
    before = [callback.append for callback, _ in loggers]
    for callback, size in loggers:
        callback.append = True
        if size_of_file(callback) > size:
            os.truncate(callback.filename, size)
    try:
        yield
    finally:
        for (callback, _), append in zip(loggers, before, strict=True):
            callback.append = append
