"""Reports whether a dataset is prepared, without importing NumPy or TensorFlow."""

from __future__ import annotations

from pathlib import Path

from cluster.system.errors import ClusterError
from train import named
from train.data import arrays, shards
from train.named import Named


def ready(data_dir: Path, name: str, source: str) -> str:
    """Describe a prepared dataset, after comparing the files' sizes; empty if it must be prepared.

    Args:
        name: the dataset; a user's dataset is never ready, because its code may have changed.
        source: `memory` or `stream`.
    """
    if arrays.is_own(name):
        return ""
    try:
        return in_words((shards if source == "stream" else arrays).find(data_dir, name))
    except ClusterError:
        return ""  # preparing fixes or explains it


def in_words(data: arrays.ArraySet | shards.ShardSet) -> str:
    """Describe a prepared dataset in a sentence."""
    if isinstance(data, arrays.ArraySet):
        features = named.each(lambda file: f"{list(file.shape[1:])} {file.dtype}", data.train.features)
        labels, form = named.each(lambda file: file.dtype, data.train.labels), ""
    else:
        features, labels = f"{list(data.train.feature_shape)} {data.train.feature_dtype}", data.train.label_dtype
        form = f", in {len(data.train.files)} and {len(data.test.files)} shards"
    return (
        f"{data.name} {data.version}: {data.train.num_examples} examples to train, {data.test.num_examples} to test, "
        f"each {_listed(features)}, {_listed(named.each(_outputs, labels, data.num_outputs))}{form}"
    )


def _outputs(label_dtype: str, count: int) -> str:
    singular, plural = ("output", "outputs") if label_dtype == "float32" else ("class", "classes")
    return f"{count} {singular if count == 1 else plural}"


def _listed(value: Named) -> str:
    return ", ".join(f"{name.strip()} {item}".strip() for name, item in named.in_words(value).items())
