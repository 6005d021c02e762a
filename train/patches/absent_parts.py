"""A script's dataset or generator may have None as labels or weights, also where replicas divide a batch.

Defect: TensorFlow divides neither None nor the empty `Optional` that Keras makes of it: `fit` ends with AttributeError.
Versions: Keras 3.15.1 and TensorFlow 2.21.0.
Test: tests/unit/train/patches/test_script_patches.py::test_generators_and_weights_that_are_none_must_count_as_a_dataset
Not applied: to datasets whose last part is not None. Keras treats a batch without that part in the same way.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter


def _with_present(keras_dataset: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that leaves out the last parts of batches that are None."""

    def get_tf_dataset(adapter: Any) -> Any:
        dataset = keras_dataset(adapter)
        parts = dataset.element_spec
        while isinstance(parts, tuple) and parts and isinstance(parts[-1], (tf.NoneTensorSpec, tf.OptionalSpec)):
            parts = parts[:-1]
        if parts == dataset.element_spec or not isinstance(dataset, tf.data.Dataset):
            return dataset
        return dataset.map(lambda *batch: batch[: len(parts)])

    return get_tf_dataset


REPLACED: list[tuple[Any, ...]] = [
    (adapter, "get_tf_dataset", _with_present(adapter.get_tf_dataset), {})
    for adapter in (GeneratorDataAdapter, TFDatasetAdapter)
]
