"""Two workers and a parameter server in one process: where variables are, and slices of steps that are done again."""

import dataclasses
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
from train.data import opening
from train.data.prepare.preparation import write_arrays
from train.data.sources import Source
from train.loops import parameter_server
from train.loops.train_step import TrainStep
from train.model import objectives
from train.model.gradients import GradientPolicy
from train.saving.checkpoint import CheckpointManager

EXAMPLES = 10
SLICES = 4
WORKERS: list[Any] = [SimpleNamespace(done=lambda step: None)] * 2
ADAM, SGD = Optimizer(), Optimizer(name="sgd", learning_rate=0.1, momentum=0.0, warmup_steps=0)
UPDATES = 150
"""In each slice."""


def cluster() -> tf.distribute.ParameterServerStrategy:
    """Start the servers and return the strategy of their chief."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
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


def new_policy(model: keras.Model, settings: Optimizer = ADAM) -> GradientPolicy:
    given: dict[str, Any] = dict.fromkeys(TaskContext.__dataclass_fields__)
    given |= {"config": TrainConfig(optimizer=settings), "source": SimpleNamespace(train_examples=EXAMPLES)}
    return TaskContext(**given | {"strategy": strategy, "model": model}).new_policy()


def counted() -> int:
    """Have both workers update at the same time; return how many of all updates an optimizer counts."""
    model = new_model()
    optimizer = new_policy(model).optimizer

    def one() -> None:
        gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def work(count: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(count):
            strategy.run(one)
        return count

    for _ in range(SLICES):
        coordinator.schedule(work, (tf.constant(UPDATES),))
    coordinator.join()
    return int(optimizer.iterations.numpy())


@dataclasses.dataclass
class Training:
    """A training whose slices are done one after the other, so that its numbers can be compared."""

    source: Source
    settings: Optimizer = SGD
    micro_batches: int = 1
    steps_per_loop: int = 8

    def __post_init__(self) -> None:
        keras.utils.set_random_seed(7)
        self.model = new_model()
        policy = new_policy(self.model, self.settings)
        self.optimizer = policy.optimizer
        objective = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)
        step = TrainStep(self.model, policy, objective, EXAMPLES, 1, self.micro_batches)
        config, records = TrainConfig(seed=7, steps_per_loop=self.steps_per_loop), {"worker_records": lambda: WORKERS}
        context: Any = SimpleNamespace(strategy=strategy, source=self.source, config=config, **records)
        self.inner = parameter_server.AsynchronousSteps(context, step)

    @property
    def bits(self) -> list[bytes]:
        return [variable.numpy().tobytes() for variable in (*self.model.variables, *self.optimizer.variables)]

    def trained(self, times: int = 1) -> dict[str, Any]:
        """Train for two slices, doing each so many times; return the results."""
        once = tf.distribute.coordinator.ClusterCoordinator.schedule

        def schedule(coordinator: Any, *arguments: Any) -> Any:
            for _ in range(times):
                value = once(coordinator, *arguments)
                coordinator.join()
            return value

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tf.distribute.coordinator.ClusterCoordinator, "schedule", schedule)
            results = [self.inner(first, 8) for first in (0, 8)]
        return {
            "losses": np.concatenate([result.losses for result in results]).tolist(),
            "updates": int(self.optimizer.iterations.numpy()),
            "weights": [variable.numpy().tolist() for variable in self.model.trainable_variables],
        }


@pytest.fixture(scope="module")
def unpatched() -> int:
    """The updates that Keras counts before it is patched."""
    found = counted()
    patches.apply()
    return found


@pytest.fixture(scope="module")
def source(unpatched, tmp_path_factory) -> Source:
    folder = tmp_path_factory.mktemp("data")
    parts = (np.random.default_rng(0).normal(size=(EXAMPLES, 2)).astype(np.float32), np.arange(EXAMPLES) % 2)
    write_arrays(folder, "own:numbers", "1", {"train": parts, "test": parts})
    return opening.open_source(TrainConfig(dataset="own:numbers"), folder)


@pytest.fixture(scope="module")
def once(source) -> dict[str, Any]:
    return Training(source).trained()


def test_slot_variables_are_on_the_parameter_servers():
    variables = new_policy(new_model()).optimizer.variables
    assert 5 == len(variables)  # iterations, and two for each of the two weights
    assert {"/job:ps"} == {variable.value.device.partition("/replica")[0] for variable in variables}


def test_keras_itself_loses_updates(unpatched):
    assert unpatched < SLICES * UPDATES


@pytest.mark.usefixtures("unpatched")
def test_two_workers_counting_at_once_lose_no_update():
    assert SLICES * UPDATES == counted()


def test_a_slice_that_is_done_again_must_not_update_again(source, once):
    """As the coordinator does with one whose worker it has lost, here with every slice."""
    assert (16, 16) == (once["updates"], len(once["losses"]))
    assert once == Training(source).trained(times=2)


def test_a_worker_must_accumulate_micro_batches(source, once):
    """One slice after the other, so that the numbers are those of whole batches."""
    cut = Training(source, micro_batches=5).trained()
    np.testing.assert_allclose(cut["losses"], once["losses"], rtol=1e-5)
    for actual, expected in zip(cut["weights"], once["weights"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert once["updates"] == cut["updates"]


def test_decay_schedules_and_averages_must_continue_with_the_same_bits_after_a_restore(source, tmp_path):
    settings = Optimizer(name="adamw", learning_rate=0.05, warmup_steps=2, schedule="cosine", decay_steps=8, ema=0.5)
    whole, half, resumed = (Training(source, settings, steps_per_loop=1) for _ in range(3))
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64)
    saves, restores = (
        CheckpointManager(of.model, of.optimizer, step, tmp_path, keep=1, writes=True) for of in (half, resumed)
    )
    for number in range(6):
        whole.inner(number, 1)
    for number in range(3):
        half.inner(number, 1)
    saves.save(3)
    saves.wait()
    for number in range(restores.restore(), 6):
        resumed.inner(number, 1)
    assert whole.bits == resumed.bits != half.bits


def test_damaged_data_must_be_reported_by_the_worker_that_reads_it(source):
    path = source.record.train.files[0].path
    path.write_bytes(bytes([path.read_bytes()[0] ^ 16]) + path.read_bytes()[1:])
    with pytest.raises(Exception) as raised:
        Training(source).trained()
    explained = program.explain(raised.value)
    assert isinstance(explained, RunFailed)
    assert "train_features.bin is damaged in block 0 " in str(explained)
