"""Initial weights of a training from a run's checkpoint or a file, instead of random ones.

    checkpoint of a run (`.index`)      written by `train/saving/checkpoint.py`, with the weights' names
    `.weights.h5`, `.keras`, `.h5`      written by Keras 3; `.h5` also by Keras 2
    `.npz`                              NumPy arrays with the weights' names, such as `dense/kernel`

A weight of the file is used if the model has one with the same name and shape. The other weights stay random.
"""

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

from cluster.system.errors import RunFailed, UsageError
from train.saving.trees import has_value, read_keys

SHOWN = 6
_NAMED = "weights/"
"""Prefix of the names of a model's weights in a checkpoint."""

Arrays = Mapping[str, np.ndarray]
"""Arrays by the weight's name, `layer/weight`; in files of Keras 3 by its layer's name and its index, `layer#0`."""


def list_weights(model: keras.Model) -> list[tuple[Any, str]]:
    """Return a model's weights with their names, `layer/weight`; without the states of random generators.

    Later weights of the same name are numbered: layers of one name that were built inside no other layer.
    """
    named_weights, counts = [], Counter[str]()
    for variable in model.weights:
        name = str(getattr(variable, "path", variable.name)).partition(":")[0].removeprefix(f"{model.name}/")
        named_weights.append((variable, f"{name}_{counts[name]}" if counts[name] else name))
        counts[name] += 1
    return named_weights


def checkpoint_name(name: str) -> str:
    """Return the name of a weight in a checkpoint."""
    return _NAMED + re.sub(r"[^A-Za-z0-9_./-]", "_", name)


def find_file(folder: Path) -> Path | None:
    """Return the file with the initial weights of a run; None if they are random."""
    files = sorted(path for path in folder.glob("*") if ".data-" not in path.name and path.suffix != ".json")
    return files[0] if files else None


def load_file(model: keras.Model, path: Path) -> str:
    """Load the weights of a file into a model; return a line that names the weights used and not used."""
    try:
        arrays = read_arrays(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, tf.errors.OpError) as error:
        raise UsageError(
            f"--init-from {path.name}: it cannot be read ({str(error).splitlines()[0][:200]}); expected a run, "
            "a .weights.h5, .keras or .h5 file, or .npz"
        ) from None
    taken, missing, used = 0, [], set()
    places: Counter[str] = Counter()
    for variable, name in list_weights(model):
        layer = name.rpartition("/")[0]
        numbered = f"{layer}#{places[layer]}"
        keys = [name, checkpoint_name(name).removeprefix(_NAMED), numbered]
        # A subclassed model's variables lack the names of the models passed to it, which the file has.
        enclosed = [key for key in arrays if key.endswith(f"/{numbered}")]
        keys += enclosed if len(enclosed) == 1 else []
        places[layer] += 1
        key = next((key for key in keys if key in arrays), None)
        if key is None:
            missing.append(f"{name} (missing)")
        elif arrays[key].shape != tuple(variable.shape):
            used.add(key)
            missing.append(f"{name} {tuple(variable.shape)} (in the file {arrays[key].shape})")
        else:
            used.add(key)
            if has_value(variable):
                variable.assign(arrays[key].astype(variable.dtype))
            taken += 1
    unused = [key for key in arrays if key not in used]
    if not taken:
        raise UsageError(
            f"--init-from {path.name}: none of its weights has the name and shape of one of the model's; "
            f"the file has {_some(list(arrays))}; the model has {_some([name for _, name in list_weights(model)])}"
        )
    line = f"began with {taken} of the {taken + len(missing)} weights from {path.name}"
    line += f"; random: {_some(missing)}" if missing else ""
    return line + (f"; not used: {_some(unused)}" if unused else "")


def read_arrays(path: Path) -> Arrays:
    """Read the weights in a file."""
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
    reader, keys = tf.train.load_checkpoint(prefix), read_keys(prefix)
    named = {name: key for name, key in keys.items() if name.startswith(_NAMED)}
    return {name.removeprefix(_NAMED): reader.get_tensor(key) for name, key in named.items()}


def _hdf5(content: io.BytesIO) -> Arrays:
    import h5py

    with h5py.File(content) as file:
        root = file.get("model_weights", file)
        if "layer_names" in root.attrs:  # written by Keras 2
            layers = [_text(name) for name in root.attrs["layer_names"]]
            named = [(layer, _text(name)) for layer in layers for name in root[layer].attrs["weight_names"]]
            return {_below(layer, name.partition(":")[0]): np.asarray(root[layer][name]) for layer, name in named}
        arrays: dict[str, np.ndarray] = {}

        def add(place: str, item: Any) -> None:
            """Add an array of a Keras 3 file: its path has classes and attributes, and `vars` the layer's name."""
            *folders, variables, number = place.split("/") if place.count("/") else ("", "", "")
            if not isinstance(item, h5py.Dataset) or variables != "vars":
                return
            layers = ["/".join(folders[:depth]) + "/vars" for depth in range(1, len(folders) + 1)]
            names = [_text(root[at].attrs["name"]) for at in layers if at in root and "name" in root[at].attrs]
            key = f"{'/'.join(names)}#{number}"
            if key in arrays:
                raise ValueError(f"it has two layers called {'/'.join(names)}")
            arrays[key] = np.asarray(item)

        root.visititems(add)
        return arrays


def _below(layer: str, name: str) -> str:
    """Return a weight's name without the model's name, which may precede the layer's."""
    rest = name.partition("/")[2]
    return rest if rest.startswith(f"{layer}/") and not name.startswith(f"{layer}/") else name


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def load_initial_weights(model: keras.Model, folder: Path) -> str:
    """Load the initial weights of a run into a model; return the line to report."""
    if (path := find_file(folder)) is None:
        raise RunFailed(f"the weights that this run begins with are gone from {folder}; start a new run")
    return load_file(model, path)
