"""What of a dataset is prepared, without preparing anything: no NumPy and no TensorFlow is imported."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import ClusterError
from train.data import arrays, shards


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
        features, labels = data.train.features, data.train.labels
        shape, dtype, label_dtype, form = list(features.shape[1:]), features.dtype, labels.dtype, ""
    else:
        shape, dtype, label_dtype = list(data.train.feature_shape), data.train.feature_dtype, data.train.label_dtype
        form = f", in {len(data.train.files)} and {len(data.test.files)} shards"
    one, many = ("output", "outputs") if label_dtype == "float32" else ("class", "classes")
    return (
        f"{data.name} {data.version}: {data.train.num_examples} examples to train, {data.test.num_examples} to test, "
        f"each {shape} {dtype}, {data.num_outputs} {one if data.num_outputs == 1 else many}{form}"
    )
