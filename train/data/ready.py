"""What of a dataset is prepared, without preparing anything: no NumPy and no TensorFlow is imported."""

from __future__ import annotations

from pathlib import Path

from cluster.system.errors import ClusterError
from train import named
from train.data import arrays, shards
from train.named import Named


def ready(data_dir: Path, name: str, source: str) -> str:
    """Return in words what is prepared of a dataset, after comparing the files' sizes; empty where preparing must see.

    Args:
        data_dir: where prepared data lies.
        name: the dataset; one of the user's own is prepared anew where its code has changed, so it is never ready.
        source: `memory` or `stream`.
    """
    if arrays.is_own(name):
        return ""
    try:
        return in_words((shards if source == "stream" else arrays).find(data_dir, name))
    except ClusterError:
        return ""  # preparing mends it, or says what is wrong


def in_words(data: arrays.ArraySet | shards.ShardSet) -> str:
    """Return what a prepared dataset holds."""
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
    one, many = ("output", "outputs") if label_dtype == "float32" else ("class", "classes")
    return f"{count} {one if count == 1 else many}"


def _listed(value: Named) -> str:
    """Return the value, or each of several after its name."""
    return ", ".join(f"{name.strip()} {one}".strip() for name, one in named.in_words(value).items())
