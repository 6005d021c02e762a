"""The trained model as a SavedModel that needs nothing of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras


def export(model: keras.Model, rebuild: keras.Model, directory: Path) -> None:
    """Write a SavedModel whose `serve` signature takes pixels `[B, H, W, C] float32` and returns logits.

    Args:
        model: the trained model, its variables mirrored or on parameter servers.
        rebuild: the same architecture with plain variables, built outside of the strategy: what is saved holds no
            trace of the cluster, and only this task is needed to save it.
        directory: replaced whole.
    """
    rebuild.set_weights(model.get_weights())
    scratch = directory.with_name(f".{directory.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    rebuild.export(str(scratch), verbose=False)
    shutil.rmtree(directory, ignore_errors=True)
    scratch.replace(directory)
