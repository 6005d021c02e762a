"""Export of the trained model as a SavedModel that does not depend on this project."""

import contextlib
import io
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from cluster.system.json_files import write_json
from train import named
from train.model import input_types
from train.named import Named

CLASSES = Path("assets.extra", "classes.json")
"""The file with the class names in an export, in TensorFlow Serving's folder for extra assets."""


def export(model: keras.Model, directory: Path, feature_shape: Named, classes: Named) -> None:
    """Write a SavedModel whose `serve` signature takes features `[B, ...]` in the model's types and returns outputs.

    Several inputs or outputs are named in the signature as in the data. The model is built outside the strategy, so
    that the export does not depend on the cluster. `feature_shape` is one example's shape, or a dictionary of them, and
    `classes` has the names of the classes; None for outputs that are values.
    """
    scratch = directory.with_name(f".{directory.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):  # Keras prints every endpoint and captured variable
        if isinstance(feature_shape, Mapping):
            archive = keras.export.ExportArchive()
            archive.track(model)
            types = input_types.input_dtypes(model, feature_shape)
            specs = {name: tf.TensorSpec([None, *shape], types[name], name) for name, shape in feature_shape.items()}
            archive.add_endpoint("serve", lambda features: model(features, training=False), [specs])
            archive.write_out(str(scratch))
        else:
            options = {}
            if not (is_legacy() or getattr(model, "inputs", None) or getattr(model, "_build_shapes_dict", None)):
                # Keras has recorded no shape of a model that sets `built` by itself.
                types = input_types.input_dtypes(model, feature_shape)
                options["input_signature"] = [keras.InputSpec(shape=(None, *feature_shape), dtype=types)]
            model.export(str(scratch), **options)
    (scratch / CLASSES).parent.mkdir(exist_ok=True)
    write_json(scratch / CLASSES, named.each(lambda names: None if names is None else list(names), classes))
    shutil.rmtree(directory, ignore_errors=True)
    scratch.replace(directory)


def add_version(directory: Path, served: Path) -> int:
    """Copy an export into the folder of a served model as its next version; return its number.

    The folder has TensorFlow Serving's layout: a folder for each version, of which the largest whole number is served;
    other names are ignored. Raises UsageError if the folder cannot be written.
    """
    try:
        served.mkdir(parents=True, exist_ok=True)
        version = 1 + max((int(path.name) for path in served.iterdir() if path.name.isdecimal()), default=0)
        with tempfile.TemporaryDirectory(prefix=".", dir=served) as scratch:
            # Renamed once it is complete, because a server loads a version as soon as it is there.
            shutil.copytree(directory, Path(scratch, "export")).replace(served / str(version))
    except OSError as error:
        raise UsageError(f"--serving {served}: {error.strerror or error}; expected a folder to write to") from error
    return version


def is_legacy() -> bool:
    """Whether the Keras in use is tf_keras, the last version of Keras 2."""
    return bool(keras.Model.__module__.startswith("tf_keras"))
