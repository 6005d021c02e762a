"""Two workers and a parameter server in one process: where variables are, and slices of steps that are done again."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import RunFailed
from cluster.system.ports import free_ports
from train import patches, program
from train.config import Optimizer, TrainConfig
from train.context import TaskContext
from train.data import arrays, sources
from train.loops import parameter_server
from train.loops.train_step import TrainStep
from train.model import objectives, optimizers
from train.model.gradients import GradientPolicy
from train.saving.checkpoint import CheckpointManager

EXAMPLES = 10
SLICES = 4
WORKERS: list[Any] = [SimpleNamespace(done=lambda step: None)] * 2
UPDATES = 150
"""In each slice."""


def cluster() -> tf.distribute.ParameterServerStrategy:
    """Start the servers and return the strategy of their chief."""
    ports = free_ports(3)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    spec = tf.train.ClusterSpec({"worker": addresses[:2], "ps": addresses[2:]})
    # With as many threads as this machine has cores, the servers of one process can wait for each other indefinitely.
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=8)
    for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        servers.append(tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=threads))
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    )


servers: list[tf.distribute.Server] = []
strategy = cluster()
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


def new_model() -> keras.Model:
    """Return a small model whose variables are on the parameter server."""
    with strategy.scope():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])


def task_context(model: keras.Model) -> TaskContext:
    """Return as much of one as makes an optimizer."""
    nothing: dict[str, Any] = dict.fromkeys(TaskContext.__dataclass_fields__)
    some = SimpleNamespace(train_examples=EXAMPLES)
    return TaskContext(**{**nothing, "config": TrainConfig(), "strategy": strategy, "model": model, "source": some})


def update(model: keras.Model, optimizer: keras.optimizers.Optimizer, slices: int, updates: int) -> None:
    """Have both workers update at the same time."""

    def one() -> None:
        gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def work(count: tf.Tensor) -> tf.Tensor:
        if updates == 1:  # not in a loop, in which no variable can be made
            strategy.run(one)
        else:
            for _ in tf.range(count):
                strategy.run(one)
        return count

    for _ in range(slices):
        coordinator.schedule(work, (tf.constant(updates),))
    coordinator.join()


def devices(variables: list[keras.Variable]) -> list[str]:
    """Return the tasks that hold the variables."""
    return [variable.value.device.partition("/replica")[0] for variable in variables]


def slots_without_build() -> list[str]:
    """Return where the variables of an optimizer land that is left to build itself."""
    model = new_model()
    with strategy.scope():
        optimizer = optimizers.build_optimizer(TrainConfig())
    update(model, optimizer, 1, 1)
    return devices(optimizer.variables)


def slots() -> list[str]:
    """Return where those of ours are."""
    model = new_model()
    optimizer = task_context(model).new_policy().optimizer
    update(model, optimizer, 1, 1)
    return devices(optimizer.variables)


def counted() -> int:
    """Return how many of all updates an optimizer counts."""
    model = new_model()
    optimizer = task_context(model).new_policy().optimizer
    update(model, optimizer, SLICES, UPDATES)
    return int(optimizer.iterations.numpy())


def data(folder: Path) -> sources.Source:
    """Write and return some examples to train on."""
    parts = (np.random.default_rng(0).normal(size=(EXAMPLES, 2)).astype(np.float32), np.arange(EXAMPLES) % 2)
    arrays.write_arrays(folder, "own:numbers", "1", {"train": parts, "test": parts})
    return sources.open_source(TrainConfig(dataset="own:numbers"), folder)


def trained(source: sources.Source, times: int, micro_batches: int = 1) -> dict[str, Any]:
    """Train for some steps, repeating each slice; return the results."""
    keras.utils.set_random_seed(7)
    model = new_model()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    objective = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)
    train_step = TrainStep(model, GradientPolicy(optimizer), objective, EXAMPLES, 1, micro_batches)
    once = tf.distribute.coordinator.ClusterCoordinator.schedule

    def schedule(self: Any, *arguments: Any) -> Any:
        for _ in range(times):
            value = once(self, *arguments)
            self.join()  # one slice after the other, so that its numbers can be compared
        return value

    tf.distribute.coordinator.ClusterCoordinator.schedule = schedule
    try:
        inner = parameter_server.AsynchronousSteps(
            strategy,
            train_step,
            source,
            WORKERS,
            seed=7,
            steps_per_loop=8,
        )
        results = [inner(first, 8) for first in (0, 8)]
    finally:
        tf.distribute.coordinator.ClusterCoordinator.schedule = once
    return {
        "losses": np.concatenate([result.losses for result in results]).tolist(),
        "updates": int(optimizer.iterations.numpy()),
        "weights": [variable.numpy().tolist() for variable in model.trainable_variables],
    }


def restored(source: sources.Source, folder: Path) -> dict[str, bool]:
    """Return whether two halves of a training, with a checkpoint between, have the bits of a whole one."""
    settings = Optimizer(name="adamw", learning_rate=0.05, warmup_steps=2, schedule="cosine", decay_steps=8, ema=0.5)

    def begun() -> tuple[CheckpointManager, Any, list[Any]]:
        keras.utils.set_random_seed(7)
        model = new_model()
        context = dataclasses.replace(task_context(model), config=TrainConfig(optimizer=settings), source=source)
        policy = context.new_policy()
        with strategy.scope():
            step = tf.Variable(0, dtype=tf.int64)
        objective = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)
        inner = parameter_server.AsynchronousSteps(
            strategy,
            TrainStep(model, policy, objective, EXAMPLES, 1),
            source,
            WORKERS,
            seed=7,
            steps_per_loop=1,  # one after the other, so that the bits can be compared
        )
        saves = CheckpointManager(model, policy.optimizer, step, folder, keep=1, writes=True)
        return saves, inner, [*model.variables, *policy.optimizer.variables]

    def bits(variables: list[Any]) -> list[bytes]:
        return [variable.numpy().tobytes() for variable in variables]

    _, inner, whole = begun()
    for step in range(6):
        inner(step, 1)
    saves, inner, half = begun()
    for step in range(3):
        inner(step, 1)
    saves.save(3)
    saves.wait()
    saves, inner, resumed = begun()
    done = saves.restore()
    for step in range(done, 6):
        inner(step, 1)
    return {"same": bits(whole) == bits(resumed), "moved": bits(half) != bits(resumed)}


@pytest.fixture(scope="module")
def unpatched() -> dict[str, Any]:
    """What Keras comes to before it is patched."""
    computed = {"slots_without_build": slots_without_build(), "slots": slots(), "counted": counted()}
    patches.apply()
    return computed


@pytest.fixture(scope="module")
def source(unpatched, tmp_path_factory) -> sources.Source:
    return data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def once(source) -> dict[str, Any]:
    return trained(source, 1)


def test_slot_variables_are_on_the_parameter_servers(unpatched):
    assert ["/job:ps"] * 5 == unpatched["slots"]  # iterations, and two for each of the two weights


def test_slot_variables_of_an_optimizer_that_builds_itself_land_on_the_chief(unpatched):
    assert "/job:chief" in unpatched["slots_without_build"]


def test_keras_itself_loses_updates(unpatched):
    assert unpatched["counted"] < SLICES * UPDATES


@pytest.mark.usefixtures("unpatched")
def test_two_workers_counting_at_once_lose_no_update():
    assert SLICES * UPDATES == counted()


def test_a_slice_that_is_done_again_must_not_update_again(source, once):
    """As the coordinator does with one whose worker it has lost, here with every slice."""
    assert (16, 16) == (once["updates"], len(once["losses"]))
    assert once == trained(source, 2)


def test_a_worker_must_accumulate_micro_batches(source, once):
    """One slice after the other, so that the numbers are those of whole batches."""
    cut = trained(source, 1, 5)
    np.testing.assert_allclose(cut["losses"], once["losses"], rtol=1e-5)
    for actual, expected in zip(cut["weights"], once["weights"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert once["updates"] == cut["updates"]


def test_decay_schedules_and_averages_must_continue_with_the_same_bits_after_a_restore(source, tmp_path):
    assert {"same": True, "moved": True} == restored(source, tmp_path)


def test_damaged_data_must_be_reported_by_the_worker_that_reads_it(source):
    path = source.arrays.train.features.path
    path.write_bytes(bytes([path.read_bytes()[0] ^ 16]) + path.read_bytes()[1:])
    with pytest.raises(Exception) as raised:
        trained(source, 1)
    explained = program.explain(raised.value)
    assert isinstance(explained, RunFailed)
    assert "train_features.bin is damaged in block 0 " in str(explained)
