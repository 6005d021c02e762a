"""Predictions of a run's exported model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.json_files import read_json
from cluster.system.messages import COMMAND
from train import named
from train.config import TrainConfig
from train.data import opening
from train.data.sources import Source
from train.model import export
from train.settings import parts

SHOWN_CLASSES = 3
LOSS_OF_LOGITS = "sparse_categorical_crossentropy"
"""The loss for which models with outputs of a softmax are refused."""


def predict(
    run: RunFolder, image: Path | None, features: Path | None = None, data_dir: Path = Path("data")
) -> list[str]:
    """Return the predictions of the exported model as lines of text: the likeliest classes first, or the values.

    The JSON file `features` holds one example: nested lists, or a dictionary of them for several inputs. Raises
    PrerequisiteError if the run has no export yet, UsageError if a file is not a valid image or example.
    """
    if not (run.export / "saved_model.pb").exists():
        raise PrerequisiteError(f"run {run.name} has no export yet; wait for its end, or `{COMMAND} export {run.name}`")
    serve = tf.saved_model.load(str(run.export)).signatures["serving_default"]
    inputs, source = serve.structured_input_signature[1], _open_source(run, data_dir)
    if features:
        example = _read_features(features, inputs)
    elif image:
        if source and not _has_pixels(source):
            raise UsageError(
                f"--image {image}: the data of {run.name} are not pixels from 0 to 255; pass an example by --features"
            )
        example = _read_image(run, image, inputs)
    outputs = serve(**example)
    names = read_json(run.export / export.CLASSES, [])
    if not isinstance(names, dict) and len(outputs) == 1:
        (output,) = outputs.values()
        several_labels = source and source.label_shape == tuple(output.shape[1:])
        names, outputs = {"": None if several_labels else names}, {"": output}
    elif not isinstance(names, dict) or not names.keys() <= outputs.keys():  # one loss compares all with the labels
        names = dict.fromkeys(sorted(outputs))  # their order varies
    losses = parts.parse_losses(run.load_config().get("loss", LOSS_OF_LOGITS))
    lines = {head: show_outputs(outputs[head][0], names[head], losses.get(head) or losses.get("")) for head in names}
    return [f"{head}:{line}" if head else line for head in names for line in lines[head]]


def show_outputs(outputs: Any, names: Sequence[str] | None, loss: str | None = LOSS_OF_LOGITS) -> list[str]:
    """Return the likeliest classes, or the values if `names` is None."""

    def row_by_row(values: Any) -> list[str]:
        rows = np.atleast_1d(values).tolist()
        return [f"  {row:.6g}" if isinstance(row, float) else f"  {json.dumps(row)}" for row in rows]

    if names is None or not outputs.shape.rank or outputs.shape[-1] < max(len(names), 2):
        return row_by_row(outputs.numpy())
    if outputs.shape.rank > 2:  # an image or similar: the class of each position
        return row_by_row(tf.argmax(outputs, -1).numpy())
    positions = []
    if outputs.shape.rank == 2:  # a sequence: the class of each position, and more of the last one
        best = tf.argmax(outputs, -1).numpy()
        positions, outputs = ["  " + " ".join(names[k] if names else str(k) for k in best)], outputs[-1]
    shares = outputs.numpy()  # another loss may be for a model that ends with a softmax
    if loss == LOSS_OF_LOGITS or shares.min() < 0 or abs(shares.sum() - 1) > 1e-3:
        shares = tf.nn.softmax(outputs).numpy()
    best = np.argsort(-shares)[:SHOWN_CLASSES]
    return [*positions, *(f"{shares[k]:7.2%}  {names[k] if names else f'class {k}'}" for k in best)]


def _open_source(run: RunFolder, data_dir: Path) -> Source | None:
    """Return the data of a run; None if they are not on this machine, or not known."""
    config = run.load_config()
    if "dataset" not in config:  # that of a script
        return None
    try:
        recorded = run if run.data_version.exists() else None
        return opening.open_source(TrainConfig.from_json(config), data_dir, recorded)
    except (ClusterError, OSError):
        return None


def _has_pixels(source: Source) -> bool:
    """Whether a source's features are bytes, but not those in which booleans are stored."""
    split = source.record.train
    if split.leaves[0].dtype != "uint8":
        return False
    return not source.in_memory or int(np.memmap(split.files[0].path, np.uint8, "r").max()) > 1


def _read_features(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--features {path}: {error}; expected a JSON file") from None
    if not isinstance(value, dict) and len(inputs) == 1:
        value = {next(iter(inputs)): value}
    if not isinstance(value, dict) or set(value) != set(inputs):
        actual = f"the features {', '.join(value)}" if isinstance(value, dict) else "one value"
        raise UsageError(f"--features {path}: {actual}; expected a dictionary of {', '.join(inputs)}")

    def tensor(name: str) -> tf.Tensor:
        spec = inputs[name]
        try:
            given, array = np.asarray(value[name]), np.asarray(value[name], spec.dtype.as_numpy_dtype)[np.newaxis]
            if not np.can_cast(given.dtype, array.dtype, "same_kind") and (given != array).any():
                raise TypeError
        except (TypeError, ValueError, OverflowError):
            array = np.zeros(0)
        if not spec.shape.is_compatible_with(array.shape):
            expected = f"{spec.dtype.name} of the shape {spec.shape.as_list()[1:]}"
            raise UsageError(f"--features {path}: {name!r} is not {expected}")
        return tf.constant(array)

    return {name: tensor(name) for name in inputs}


def _read_image(run: RunFolder, path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Read an image at the size and in the type of the model's input, `[1, H, W, C]` of 0 to 255."""
    shapes = {name: spec.shape.as_list() for name, spec in inputs.items()}
    (name, shape), *others = shapes.items()
    if others or len(shape) != 4 or shape[-1] not in (1, 3):
        expected = named.each(str, shapes if others else shape)
        raise UsageError(f"the model of {run.name} takes {expected}, not images; pass an example by --features")
    _, height, width, channels = shape
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # conversion would cut its values off at 255
                raise UsageError(f"--image {path}: its pixels have more than 8 bits; save it with 8")
            resized = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB").resize((width, height))
    except OSError as error:
        why = error.strerror or "it is not an image"
        raise UsageError(f"--image {path}: {why}; expected a PNG or JPEG file") from None
    pixels = np.asarray(resized, inputs[name].dtype.as_numpy_dtype)
    return {name: tf.constant(pixels.reshape(1, height, width, channels))}
