"""Writes a dataset that fits in memory as arrays, see `train/data/dataset_record.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train import named
from train.data import store
from train.data.dataset_record import DTYPES, ArrayRecord, is_user_dataset, values_in
from train.named import Named

if TYPE_CHECKING:
    import numpy as np


def write_arrays(
    data_dir: Path,
    name: str,
    version: str,
    splits: Mapping[str, tuple[Named, ...]],
    *,
    classes: Named = (),
    source: str = "",
    source_files: Mapping[str, str] | None = None,
) -> ArrayRecord:
    """Write the arrays of a dataset in place of earlier ones; return their record. An interrupted call leaves nothing.

    `splits` has features, labels and optional weights of "train" and "test", see `Split`. `source` describes their
    origin, only in the record's JSON. For the other arguments see `ArrayRecord`.
    """
    labels = [arrays[1] for arrays in splits.values()]
    index: dict[str, Any] = {"name": name, "version": version, "classes": classes}

    def count_outputs(classes: tuple[str, ...], *labels: np.ndarray) -> int:
        if labels[0].dtype.kind == "f":
            return values_in(labels[0].shape[1:])
        return len(classes) or 1 + max(int(array.max()) for array in labels)

    num_outputs = named.each(count_outputs, classes, *labels)
    index |= {"num_outputs": num_outputs, "source": source, "source_files": dict(source_files or {})}
    with store.new_folder(data_dir, "arrays", name, version) as folder:
        index["splits"] = {
            split: {
                part: _write_part(folder / f"{split}_{part}.bin", part_arrays, DTYPES[part])
                for part, part_arrays in zip(DTYPES, arrays, strict=False)  # weights may be missing
            }
            for split, arrays in splits.items()
        }
        (folder / "arrays.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if is_user_dataset(name):
        store.write_pointer(data_dir, "arrays", name, version)
    return ArrayRecord.find(data_dir, name, version)


def _write_part(path: Path, array: Named, dtypes: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(array, Mapping):
        return {name: _write_part(path.with_stem(f"{path.stem}_{name}"), item, dtypes) for name, item in array.items()}
    from train.data import blocks  # imports TensorFlow

    if array.dtype.name not in dtypes:
        raise ValueError(f"{path.name} must be {' or '.join(dtypes)}, not {array.dtype}")
    data = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    data.tofile(path)
    return {"file": path.name, "shape": array.shape, "dtype": array.dtype.name, **blocks.digests(path)}
