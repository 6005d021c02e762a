"""Batches from data workers: those that a task would read itself, in their order, also after a data worker's end."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.ports import free_ports
from train.config import TrainConfig
from train.data import sources
from train.data.batches import BatchSlice, Replicas
from train.data.function import calling, data_service, random_access
from train.data.function.data_service import Service
from train.data.function.examine import examine
from train.data.sources import Source

GLOBAL_BATCH, FIRST = 8, 3

MODULE = """
import numpy as np
import tensorflow as tf


class Numbers:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return np.full(2, index, "float32"), index % 3


def data(split, shard):
    return Numbers()


def dataset(split, shard):
    numbers = tf.data.Dataset.range(50).shard(shard.count, shard.index).shuffle(50, seed=shard.seed)
    return numbers.map(lambda i: (tf.fill([2], tf.cast(i, tf.float32)), i % 3))
"""


RUNNING = []
"""Servers end with the process: TensorFlow stops a data worker while it holds the interpreter's lock, and waits for
threads of the worker that may need that lock."""


class Served:
    """A dispatcher and one data worker in this process, and a function's source with and without them."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.newest = tmp_path, 0
        self.ports = free_ports(2)
        self.dispatcher = data_service.dispatcher(self.ports[0], tmp_path / "journal")
        self.worker = data_service.worker(0, f"127.0.0.1:{self.ports[1]}", self.address, lambda: self.newest)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def source(self, name: str, generation: int = 0) -> tuple[Source, Source]:
        """Return the source that a task reads itself, and the one through the data worker."""
        examine(name, self.tmp_path / "data", "3")
        config = TrainConfig(source="function", dataset=name, num_outputs=3)
        through = Service(self.address, 1, generation)
        folder = self.tmp_path / "data"
        return sources.find(config, folder), sources.find(config, folder, None, through)


@pytest.fixture
def served(tmp_path, monkeypatch) -> Served:
    """A data service."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_served.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "own_served", raising=False)
    monkeypatch.setattr(random_access, "_OPEN", {})
    RUNNING.append(Served(tmp_path))
    return RUNNING[-1]


def batches(source: Source, count: int, replicas: int = 2) -> Iterator[list[int]]:
    """Yield the first features of the batches of some steps."""
    for batch in source.train_dataset(BatchSlice(GLOBAL_BATCH, 7, FIRST, count, Replicas(replicas, 0, replicas))):
        assert (GLOBAL_BATCH // replicas, 2) == batch.features.shape
        yield batch.features[:, 0].numpy().astype(int).tolist()


@pytest.mark.parametrize("name", ["own_served:data", "own_served:dataset"])
def test_a_task_gets_the_batches_that_it_would_read_itself(served, name):
    direct, through = served.source(name)
    assert [*batches(direct, 20)] == [*batches(through, 20)]


def test_a_data_worker_that_begins_again_repeats_nothing():
    sent = tf.data.Dataset.from_tensor_slices([1, 3, 5, 7, 3, 5, 7, 9, 11]).map(
        lambda step: (tf.cast(step, tf.int64), step)
    )
    taken = [int(step) for step, _ in data_service._without_repeats(sent, 1, 2, 0)]
    assert [1, 3, 5, 7, 9, 11] == taken


def test_a_step_that_is_left_out_is_an_error():
    sent = tf.data.Dataset.from_tensor_slices([0, 1, 3]).map(lambda step: (tf.cast(step, tf.int64), step))
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(data_service._without_repeats(sent, 0, 1, 0))


def test_a_data_worker_begins_at_the_newest_step(served):
    direct, through = served.source("own_served:data")
    served.newest = FIRST - 1  # the run's newest step is not later than a task's next one
    assert [*batches(direct, 5)] == [*batches(through, 5)]


def test_data_workers_share_the_steps():
    steps = [[data_service._next(first, worker, 3) for worker in range(3)] for first in (0, 1, 2, 7)]
    assert [[0, 1, 2], [3, 1, 2], [3, 4, 2], [9, 7, 8]] == steps


def test_shards_of_two_data_workers_cover_the_steps(served):
    """Each worker's part, read here: every step once, from its own shards."""
    served.source("own_served:dataset")
    known = calling.find(served.tmp_path / "data", "own_served:dataset")
    seen: dict[int, Any] = {}
    for worker in range(2):
        first = tf.constant(FIRST, tf.int64)
        steps = data_service._steps_of_worker(known, served.tmp_path, BatchSlice(8, 7), worker, 2, first)
        for step, batch in steps.take(6):
            assert (1, 8, 2) == batch.features.shape
            assert int(step) % 2 == worker and np.all(batch.features[0, :, 0] % 2 == worker)
            seen[int(step)] = batch
    assert list(range(FIRST, FIRST + 12)) == sorted(seen)
