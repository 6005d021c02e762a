"""The trained model as a SavedModel that needs nothing of ours."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Mapping
from pathlib import Path

from tensorflow import keras

from cluster.system.json_files import write_json
from train import named
from train.model import inputs
from train.named import Named

CLASSES = Path("assets.extra", "classes.json")
"""Where an export keeps the names of its classes: TensorFlow Serving's place for what it need not know."""


def export(model: keras.Model, directory: Path, feature_shape: Named, classes: Named) -> None:
    """Write a SavedModel whose `serve` signature takes features `[B, ...]` in the model's types and returns outputs.

    Several inputs, and several outputs, have the names of the data in the signature.

    Args:
        model: with plain variables, built outside of the strategy: what is saved holds no trace of the cluster, and
            only this task is needed to save it.
        directory: replaced whole.
        feature_shape: one example's shape, or a dictionary of them.
        classes: their names, kept beside the model; None for outputs that are values.
    """
    scratch = directory.with_name(f".{directory.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):  # Keras prints every endpoint and captured variable
        if isinstance(feature_shape, Mapping):
            archive = keras.export.ExportArchive()
            archive.track(model)
            signature = inputs.signature(model, feature_shape)
            archive.add_endpoint("serve", lambda features: model(features, training=False), [signature])
            archive.write_out(str(scratch))
        else:
            model.export(str(scratch))
    (scratch / CLASSES).parent.mkdir(exist_ok=True)
    write_json(scratch / CLASSES, named.each(lambda names: None if names is None else list(names), classes))
    shutil.rmtree(directory, ignore_errors=True)
    scratch.replace(directory)


def is_legacy() -> bool:
    """Whether the Keras in use is tf_keras, Keras's last version 2."""
    return bool(keras.Model.__module__.startswith("tf_keras"))
