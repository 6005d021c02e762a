"""Batches that other processes prepare: TensorFlow's tf.data service, as tasks of the cluster (`--data-workers N`).

Data worker w of N prepares the batches of every step s with s modulo N = w, and sends each with its step. A task takes
them in the order of the steps, from each data worker in turn, so that it always trains on the same batches. With a
random-access source they are the batches that the tasks would read themselves. A dataset can only be read from its
beginning, so there each data worker has separate shards, N for every replica.

A data worker that was killed restarts at the newest step of the run, and a task skips batches that it has already
received: nothing is lost or repeated. Each part of a job is prepared by a single data worker, which recognizes it by
its index; it is empty for the others. So TensorFlow's processing mode is `ShardingPolicy.OFF`.

Under parameter servers all workers share one job, and a batch goes to the worker that requests it.

Shapes: L replicas of a task, B replica batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops  # the registry of functions that graphs call has no public name

from train.data.batches import Batch, BatchSlice, without_sharding
from train.data.function import epochs, random_access
from train.data.function.calling import Record

_WORKER_TAG = "tf-cluster data worker"
_KEPT: list[Any] = []
"""Functions that this process has registered; TensorFlow keeps only weak references."""
HEARTBEAT_MS = 500
JOB_GC_MS = 60_000


@dataclass(frozen=True)
class Service:
    """The data service of one generation of a run.

    Attributes:
        address: address of the dispatcher.
        workers: number of data workers.
        generation: generation of the run, with which jobs end.
        shared: whether all tasks take batches of the same job, each batch for one of them.
    """

    address: str
    workers: int
    generation: int
    shared: bool = False

    def dataset(self, record: Record, data_dir: Path, batch_slice: BatchSlice) -> tf.data.Dataset:
        """Return one batch for each replica, step by step."""
        first_step, replicas = batch_slice.first_step, batch_slice.replicas
        parts = []
        for worker in range(self.workers):
            job = f"{self.generation}/{first_step}/{replicas.first}/{worker}"
            prepare = functools.partial(_steps_of_worker, record, data_dir, batch_slice, worker, self.workers)
            part = _of_worker(worker, first_step, prepare).apply(
                tf.data.experimental.service.distribute(
                    tf.data.experimental.service.ShardingPolicy.OFF,
                    f"grpc://{self.address}",
                    job_name=job,
                    compression=None,
                )
            )
            parts.append(part if self.shared else _without_repeats(part, worker, self.workers, first_step))
        turns = tf.data.Dataset.range(first_step, tf.int64.max).map(lambda step: step % self.workers)
        chosen = tf.data.Dataset.choose_from_datasets(parts, turns, stop_on_empty_dataset=True)
        batches = chosen.map(lambda _, batches: batches).unbatch()
        # A distributed dataset keeps the shapes of its batches if it is known to be infinite.
        batches = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return without_sharding(batches.take(batch_slice.num_batches).prefetch(tf.data.AUTOTUNE))


def _of_worker(worker: int, first_step: int, prepare: Callable[[tf.Tensor], tf.data.Dataset]) -> tf.data.Dataset:
    """Return a part of a job: the batches of one data worker from a step on; empty on the others."""

    def identity(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        index, step = tf.raw_ops.PyFunc(input=[], token=_WORKER_TAG, Tout=[tf.int64, tf.int64])
        return tf.ensure_shape(index, []), tf.ensure_shape(step, [])

    @tf.autograph.experimental.do_not_convert
    def prepared(_: tf.Tensor, step: tf.Tensor) -> tf.data.Dataset:
        return prepare(tf.maximum(step, first_step))

    return (
        tf.data.Dataset.range(1).map(identity).filter(lambda index, _: index == worker).flat_map(prepared).prefetch(2)
    )


def _steps_of_worker(
    record: Record, data_dir: Path, batch_slice: BatchSlice, worker: int, workers: int, first: tf.Tensor
) -> tf.data.Dataset:
    """Return the batches of a data worker's steps from step `first` on, each with its number."""
    first = _next(first, worker, workers)
    steps, replicas = tf.data.Dataset.range(first, tf.int64.max, workers), batch_slice.replicas.numbers
    if record.random_access:
        numbers = [tf.constant(replica, tf.int64) for replica in replicas]

        def read(step: tf.Tensor) -> tuple[tf.Tensor, Batch]:
            return step, _stacked(*(random_access.train_batch(record, step, number, batch_slice) for number in numbers))

        return steps.map(read)
    of_worker = dataclasses.replace(batch_slice, first_step=first)
    shards = [epochs.shard_batches(record, data_dir, of_worker, replica, worker, workers) for replica in replicas]
    return tf.data.Dataset.zip((steps, tf.data.Dataset.zip(tuple(shards)).map(_stacked)))


def _stacked(*of_replicas: Batch) -> Batch:
    stacked: Batch = tf.nest.map_structure(lambda *parts: tf.stack(parts), *of_replicas)
    return stacked


def _next(first: Any, worker: int, workers: int) -> Any:
    """Return the first step of a data worker from step `first` on."""
    return first + (worker - first) % workers


def _without_repeats(part: tf.data.Dataset, worker: int, workers: int, first_step: int) -> tf.data.Dataset:
    """Remove repeated steps of a data worker, which may have restarted at an earlier step."""

    def follow(expected: tf.Tensor, of_step: tuple[tf.Tensor, Any]) -> tuple[tf.Tensor, tuple[tf.Tensor, Any]]:
        step, _ = of_step
        none_left_out = tf.debugging.assert_less_equal(step, expected, "a data worker left out a step")
        with tf.control_dependencies([none_left_out]):
            new = tf.identity(step == expected)
        return tf.where(new, expected + workers, expected), (new, of_step)

    start = tf.constant(_next(first_step, worker, workers), tf.int64)
    followed = part.scan(start, follow)
    return followed.filter(lambda new, _: new).map(lambda _, of_step: of_step)


# The tasks that serve


def dispatcher(port: int, work_dir: Path) -> Any:
    """Start the dispatcher in this process and return it; it continues from the journal of a killed one."""
    work_dir.mkdir(parents=True, exist_ok=True)
    config = tf.data.experimental.service.DispatcherConfig(
        port=port,
        protocol="grpc",
        work_dir=str(work_dir),
        fault_tolerant_mode=True,
        job_gc_check_interval_ms=JOB_GC_MS,
        job_gc_timeout_ms=JOB_GC_MS,
    )
    return tf.data.experimental.service.DispatchServer(config)


def worker(index: int, address: str, dispatcher: str, newest_step: Callable[[], int]) -> Any:
    """Start a data worker in this process and return it.

    Args:
        newest_step: returns the steps that the run has done in this generation; 0 if unknown.
    """

    def identity() -> list[np.ndarray]:
        return [np.array(index, np.int64), np.array(newest_step(), np.int64)]

    _KEPT.append(identity)
    script_ops._py_funcs._funcs[_WORKER_TAG] = identity
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=address,
        port=int(address.rpartition(":")[2]),
        protocol="grpc",
        heartbeat_interval_ms=HEARTBEAT_MS,
    )
    return tf.data.experimental.service.WorkerServer(config)
