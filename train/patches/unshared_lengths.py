"""An epoch of a script whose tasks do not share a dataset has all of its batches (AutoShardPolicy.OFF).

Defect: Keras ends an epoch after as many steps as a task's dataset has batches. Without sharing, N replicas make N
steps of a batch: the rest of the data is never seen. Tasks with different numbers of batches fail in a collective.
Versions: Keras 3.15.1.
Test: tests/unit/train/patches/test_script_patches.py::test_datasets_that_are_not_shared_must_be_used_to_their_end
Not applied: to datasets of unknown length, which end once no task has data, with `steps_per_epoch`, and to a task that
trains alone.
"""

from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer  # has no public name
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from . import shared_orders

_keras_init = trainer.TFEpochIterator.__init__


def _init(iterator: Any, distribute_strategy: Any = None, *args: Any, **options: Any) -> None:
    several = isinstance(distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)
    several = several and distribute_strategy.extended._in_multi_worker_mode()
    with shared_orders.dividing(several):
        _keras_init(iterator, distribute_strategy, *args, **options)
    adapter, known = iterator.data_adapter, iterator._num_batches and not iterator.steps_per_epoch
    if not several or not isinstance(adapter, TFDatasetAdapter) or not isinstance(adapter._dataset, tf.data.Dataset):
        return
    policy = adapter._dataset.options().experimental_distribute.auto_shard_policy
    if policy != tf.data.experimental.AutoShardPolicy.OFF:
        if shared_orders.draws_alone(adapter._dataset):
            shared_orders.warn()
    elif known:
        adapter._dataset = adapter._dataset.filter(lambda *_: True)  # only its length is read, which is unknown now
        iterator._num_batches = None


REPLACED = [(trainer.TFEpochIterator, "__init__", _init, {"fixed": "auto_shard_policy"})]
