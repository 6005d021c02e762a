"""An epoch of a script whose tasks do not share a dataset has all of its batches (AutoShardPolicy.OFF).

Defect: Keras ends an epoch after as many steps as a task's dataset has batches. Without sharing, N replicas make N
steps of a batch: the rest of the data is never seen. Tasks with different numbers of batches fail in a collective.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_datasets_that_are_not_shared_must_be_used_to_their_end
Not applied: to datasets of unknown length, which end once no task has data, and to a task that trains alone.
"""

from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer  # has no public name

_keras_init = trainer.TFEpochIterator.__init__


def _init(iterator: Any, distribute_strategy: Any = None, *args: Any, **options: Any) -> None:
    _keras_init(iterator, distribute_strategy, *args, **options)
    several = isinstance(distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)
    dataset = iterator.data_adapter.get_tf_dataset()
    if several and distribute_strategy.extended._in_multi_worker_mode() and isinstance(dataset, tf.data.Dataset):
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if policy == tf.data.experimental.AutoShardPolicy.OFF and iterator._num_batches:
            iterator.data_adapter._dataset = dataset.filter(lambda *_: True)  # which has an unknown length
            iterator._num_batches = None


REPLACED = [(trainer.TFEpochIterator, "__init__", _init, {"fixed": "auto_shard_policy"})]
