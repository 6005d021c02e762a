"""The weights that a training begins with instead of random ones: of a run's checkpoint, or of a file.

    checkpoint of a run (`.index`)      as `train/saving/checkpoint.py` writes it, with the weights' names
    `.weights.h5`, `.keras`, `.h5`      as Keras 3 writes them; of `.h5` also as Keras 2 did
    `.npz`                              NumPy arrays, named as the weights: `dense/kernel`

A weight is taken where name and shape are those of one of the model's. What does not match keeps its random values.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.core.protobuf import trackable_object_graph_pb2

from cluster.system.errors import RunFailed, UsageError
from train.saving.mirror import has_value

SHOWN = 6
_NAMED = "weights/"
"""What the names of a model's weights begin with in a checkpoint."""

Arrays = Mapping[str, np.ndarray]
"""By the weight's name, `layer/weight`, or, of Keras 3's files, by its layer's name and its place, `layer#0`."""


def names(model: keras.Model) -> list[tuple[Any, str]]:
    """Return a model's weights with their names, `layer/weight`; without the states of random generators."""
    found = []
    for variable in model.variables:
        path = str(getattr(variable, "path", variable.name)).partition(":")[0]
        if tf.as_dtype(variable.dtype).is_floating:
            found.append((variable, path.removeprefix(f"{model.name}/")))
    return found


def checkpoint_name(name: str) -> str:
    """Return what a checkpoint calls a weight."""
    return _NAMED + re.sub(r"[^A-Za-z0-9_./-]", "_", name)


def file_in(folder: Path) -> Path | None:
    """Return the file with the weights that a run begins with; None where it begins with random ones."""
    found = sorted(path for path in folder.glob("*") if ".data-" not in path.name and path.suffix != ".json")
    return found[0] if found else None


def load(model: keras.Model, path: Path) -> str:
    """Give a model the weights of a file, and return in one line what was taken and what was not.

    Raises:
        UsageError: the file holds no weights, or none that the model has.
    """
    try:
        arrays = read(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, tf.errors.OpError) as error:
        raise UsageError(
            f"--init-from {path.name}: it cannot be read ({str(error).splitlines()[0][:200]}); expected a run, "
            "a .weights.h5, .keras or .h5 file, or .npz"
        ) from None
    taken, missing, used = 0, [], set()
    places: Counter[str] = Counter()
    for variable, name in names(model):
        layer = name.rpartition("/")[0]
        keys = [name, checkpoint_name(name).removeprefix(_NAMED), f"{layer}#{places[layer]}"]
        places[layer] += 1
        key = next((key for key in keys if key in arrays), None)
        if key is None:
            missing.append(f"{name} (not there)")
        elif arrays[key].shape != tuple(variable.shape):
            used.add(key)
            missing.append(f"{name} {tuple(variable.shape)} (there {arrays[key].shape})")
        else:
            used.add(key)
            if has_value(variable):
                variable.assign(arrays[key].astype(variable.dtype))
            taken += 1
    unused = [key for key in arrays if key not in used]
    if not taken:
        raise UsageError(
            f"--init-from {path.name}: none of its weights has a name and a shape of the model's; "
            f"there: {_some(list(arrays))}; the model's: {_some([name for _, name in names(model)])}"
        )
    line = f"began with {taken} of the {taken + len(missing)} weights from {path.name}"
    line += f"; random: {_some(missing)}" if missing else ""
    return line + (f"; not used: {_some(unused)}" if unused else "")


def read(path: Path) -> Arrays:
    """Return the weights in a file.

    Raises:
        OSError, ValueError, KeyError, BadZipFile, tf.errors.OpError: it cannot be read.
    """
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    if path.suffix == ".index":
        return _checkpoint(str(path.with_suffix("")))
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            return _hdf5(io.BytesIO(archive.read("model.weights.h5")))
    return _hdf5(io.BytesIO(path.read_bytes()))


def _checkpoint(prefix: str) -> Arrays:
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    attributes = [attribute for node in graph.nodes for attribute in node.attributes]
    return {
        attribute.full_name.removeprefix(_NAMED): reader.get_tensor(attribute.checkpoint_key)
        for attribute in attributes
        if attribute.full_name.startswith(_NAMED)
    }


def _hdf5(content: io.BytesIO) -> Arrays:
    import h5py

    with h5py.File(content) as file:
        root = file.get("model_weights", file)
        if "layer_names" in root.attrs:  # of Keras 2
            layers = [_text(name) for name in root.attrs["layer_names"]]
            named = [(layer, _text(name)) for layer in layers for name in root[layer].attrs["weight_names"]]
            return {_below(layer, name.partition(":")[0]): np.asarray(root[layer][name]) for layer, name in named}
        found: dict[str, np.ndarray] = {}
        root.visititems(lambda place, item: _add(found, root, place, item, isinstance(item, h5py.Dataset)))
        return found


def _below(layer: str, name: str) -> str:
    """Return a weight's name from its layer's on: before that may come the model's."""
    rest = name.partition("/")[2]
    return rest if rest.startswith(f"{layer}/") and not name.startswith(f"{layer}/") else name


def _add(found: dict[str, np.ndarray], root: Any, place: str, item: Any, is_array: bool) -> None:
    """Add an array of Keras 3's, whose place is of classes and attributes; the layers' names are beside `vars`."""
    *folders, variables, number = place.split("/") if place.count("/") else ("", "", "")
    if not is_array or variables != "vars":
        return
    layers = ["/".join(folders[:depth]) + "/vars" for depth in range(1, len(folders) + 1)]
    names = [_text(root[layer].attrs["name"]) for layer in layers if layer in root and "name" in root[layer].attrs]
    found[f"{'/'.join(names)}#{number}"] = np.asarray(item)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _some(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def begin(model: keras.Model, folder: Path) -> str:
    """Give a model the weights that its run begins with, if any; return what is to be reported, or nothing.

    Raises:
        UsageError: as `load`.
        RunFailed: the run's configuration names some, and they are gone.
    """
    path = file_in(folder)
    if path is None:
        raise RunFailed(f"the weights that this run begins with are gone from {folder}; start a new run")
    return load(model, path)
