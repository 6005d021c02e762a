"""The interface between the loops and data in any form. Shapes: B replica batch."""

import abc
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from train import named
from train.data.batches import Batch, BatchSlice, Replicas
from train.data.dataset_record import DatasetRecord
from train.named import Named


class Examples(Protocol):
    """Examples of a split that are read by their numbers."""

    @property
    def num_examples(self) -> int:
        """Number of examples."""

    def read_batch(self, indices_B: tf.Tensor) -> Batch:
        """Return the examples with these numbers and their weights."""


@dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """Examples to train on and to test on.

    With several inputs or heads, the properties that describe a single one are dictionaries.

    Attributes:
        record: the dataset.
        in_memory: whether the examples fit in memory, so that batches can be gathered inside the step.
        sharded: whether replicas read separate shards, so that batches depend on the number of replicas.
    """

    record: DatasetRecord
    in_memory: bool = False
    sharded: bool = False

    @property
    def num_shards(self) -> int:
        """Number of files of a stream, on which its order depends; 0 for others."""
        return 0

    @property
    def num_outputs(self) -> Named:
        """Number of classes or of values to predict."""
        return self.record.num_outputs

    @property
    def classifies(self) -> Named:
        return named.each(lambda leaf: leaf.dtype == "int64", self.record.train.example["labels"])

    @property
    def named_outputs(self) -> Named:
        """Names of the classes of the outputs, empty without names; None for outputs that are values."""
        classes = self.record.classes
        return named.each(lambda classifies, names: names if classifies else None, self.classifies, classes)

    @property
    def feature_shape(self) -> Named:
        return named.each(lambda leaf: leaf.shape, self.record.train.example["features"])

    @property
    def label_shape(self) -> Named:
        return named.each(lambda leaf: leaf.shape, self.record.train.example["labels"])

    @property
    def weighted(self) -> bool:
        return "weights" in self.record.train.example

    @property
    def train_examples(self) -> int:
        return self.record.train.num_examples

    @property
    def test_examples(self) -> int:
        return self.record.test.num_examples

    def examples(self, split: str) -> Examples | None:  # noqa: ARG002  # for sources that can
        """Return the examples of a split, eagerly or inside a graph; None if they cannot be read by their numbers."""
        return None

    @abc.abstractmethod
    def train_dataset(self, batch_slice: BatchSlice) -> tf.data.Dataset:
        """Return the infinite batches of a slice, of static shapes: one for each replica, step by step."""

    @abc.abstractmethod
    def eval_dataset(self, replica_batch: int, replicas: Replicas) -> tf.data.Dataset:
        """Return the batches of the test split, with the same number for every replica."""

    def shuffled_batches(self, global_batch: int, seed: int) -> tf.data.Dataset:
        """Return infinite global batches for one of several equal workers, starting at a random epoch.

        All workers run the same graph and do not know their index, so each draws a random first epoch in each
        generation.
        """
        first, last = (tf.constant(number, tf.int64) for number in (0, 2**20))
        # Unlike `tf.random`, this is random even if operations are deterministic.
        epoch = tf.raw_ops.RandomUniformInt(shape=tf.zeros(0, tf.int32), minval=first, maxval=last, seed=0, seed2=0)
        return self.train_dataset(BatchSlice(global_batch, seed, self.train_examples * epoch // global_batch))
