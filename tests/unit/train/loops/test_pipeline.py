"""A training in stages computes what plain Keras does on one device, whatever stages share, or is refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from train import patches
from train.config import Optimizer, Pipeline, TrainConfig
from train.data import memory
from train.data.batches import BatchSlice, Replicas
from train.loops import pipeline
from train.model import objectives, optimizers
from train.model.gradients import GradientPolicy
from train.patches import placed_seeds
from train.pipeline.division import Division

EXAMPLES, TOKENS, VOCABULARY = 40, 5, 11
MADE = keras.layers


@pytest.fixture(autouse=True, scope="module")
def _installed():
    patches.apply()


def config(**values: Any) -> TrainConfig:
    chosen = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.02}
    values["optimizer"] = Optimizer(**chosen | values.pop("optimizer", {}))
    values["pipeline"] = Pipeline(**values.pop("pipeline", {}))
    return TrainConfig(**{"global_batch": 8, "micro_batches": 4, "steps_per_loop": 6} | values)


def examples(dtype: str = "int32", labels: tuple[int, ...] = (TOKENS,)) -> memory.Examples:
    random = np.random.default_rng(1)
    features = random.integers(0, VOCABULARY, (EXAMPLES, TOKENS))
    made = features if "int" in dtype else random.normal(size=features.shape)
    wanted = random.integers(0, VOCABULARY, (EXAMPLES, *labels))
    return memory.Examples(tf.constant(made, dtype), tf.constant(wanted, tf.int64), None)


class Setting:
    """What a training in stages and its reference have in common."""

    def __init__(self, new_model: Callable[[], keras.Model], data: memory.Examples, settings: TrainConfig) -> None:
        self.data, self.config, self.own_model = data, settings, new_model
        self.objective = objectives.of(settings, classifies=True, predicts_text=False)

    def new_model(self) -> keras.Model:
        keras.utils.set_random_seed(3)
        return self.own_model()

    def batch(self, step: int, micro_batch: int) -> Any:
        parts = self.config.micro_batches
        cut = BatchSlice(self.config.global_batch, self.config.seed, replicas=Replicas(parts))
        return memory.train_batch(self.data, tf.constant(step, tf.int64), tf.constant(micro_batch, tf.int64), cut)


class InStages(Setting):
    """A training in the stages of one process."""

    def __init__(self, *args: Any, stages: int, folder: Path) -> None:
        super().__init__(*args)
        cluster = spec.build(workers=0, devices=stages, strategy="pipeline")
        self.division = Division(cluster, cluster.task("chief"), self.config, None)
        self.division.device = lambda stage: None  # type: ignore[method-assign]  # this process has one device
        self.model = self.division.build(self.new_model, self.data.features.shape[1:])
        make = self.division.build_optimizer
        self.optimizer = optimizers.build_for(self.config, self.model, 100, make)
        context: Any = SimpleNamespace(
            config=self.config,
            division=self.division,
            source=SimpleNamespace(arrays=SimpleNamespace(train=self.data, test=self.data)),
            run=RunFolder(folder),
            task=cluster.task("chief"),
            gang=tf.distribute.get_strategy(),
            objective=self.objective,
            model=self.model,
        )
        policy = optimizers.policy(self.config, self.optimizer)
        self._pipeline = pipeline.Pipeline(context, policy)

    def losses(self, first: int, count: int) -> np.ndarray:
        return self._pipeline.run(first, count).losses


class Reference(Setting):
    """The same on one device: plain Keras, one micro-batch after the other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model = self.new_model()
        self.optimizer = optimizers.build_for(self.config, self.model, 100)
        self.policy: GradientPolicy = optimizers.policy(self.config, self.optimizer)

    def losses(self, first: int, count: int) -> np.ndarray:
        return np.array([float(self._step(tf.constant(step, tf.int64))) for step in range(first, first + count)])

    def losses_of_updates(self, rates: list[float]) -> list[float]:
        """Return the losses of steps with these learning rates, each of which updates after every micro-batch."""
        variables, parts = self.model.trainable_variables, self.config.micro_batches
        adam = keras.optimizers.Adam(0.0)
        means = []
        for step, rate in enumerate(rates):
            adam.learning_rate = rate
            losses = []
            for micro_batch in range(parts):
                with tf.GradientTape() as tape:
                    loss = parts * self._loss(self.batch(step, micro_batch), tf.constant(step, tf.int64), micro_batch)
                adam.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
                losses.append(float(loss))
            means.append(sum(losses) / parts)
        return means

    def _step(self, step: tf.Tensor) -> tf.Tensor:
        variables, total = self.model.trainable_variables, 0.0
        sums = [tf.zeros(variable.shape) for variable in variables]
        state = [variable for variable in self.model.non_trainable_variables if "seed" not in variable.path]
        before, after = [variable.numpy() for variable in state], []
        for micro_batch in range(self.config.micro_batches):
            batch = self.batch(step, micro_batch)
            for variable, value in zip(state, before, strict=True):
                variable.assign(value)
            with tf.GradientTape() as tape:
                loss = self._loss(batch, step, micro_batch)
            total += loss
            after.append([variable.numpy() for variable in state])
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            sums = [
                old if new is None else old + tf.convert_to_tensor(new)
                for old, new in zip(sums, gradients, strict=True)
            ]
        if self.config.optimizer.clip_norm:
            sums, _ = tf.clip_by_global_norm(sums, self.config.optimizer.clip_norm)
        self.optimizer.apply(sums, variables)
        for variable, values in zip(state, zip(*after, strict=True), strict=True):
            variable.assign(np.mean(values, axis=0))  # of equal whole numbers, too
        return total

    def _loss(self, batch: Any, step: tf.Tensor, micro_batch: int) -> tf.Tensor:
        place = placed_seeds.random_place(step, tf.zeros([], tf.int64), tf.constant(micro_batch, tf.int64))
        with place:
            outputs = tf.cast(self.model(batch.features, training=True), tf.float32)
            loss = tf.reduce_sum(self.objective.loss(batch.labels, outputs)) / self.config.global_batch
        return loss + sum(self.model.losses, start=tf.zeros([])) / self.config.micro_batches


class Tied(keras.layers.Layer):
    """Multiplies by the weights of an embedding."""

    def __init__(self, embedding: keras.layers.Embedding, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, values_BTD: Any) -> Any:
        return keras.ops.matmul(values_BTD, keras.ops.transpose(self.embedding.embeddings))


class Noise(keras.layers.Layer):
    """Adds noise from Keras's global generator."""

    def call(self, values: Any, training: bool | None = None) -> Any:
        return values + keras.random.normal(keras.ops.shape(values)) if training else values


class Centred(keras.layers.Layer):
    """Subtracts a running mean, counts its calls, and adds a loss."""

    def build(self, shape: tuple[int, ...]) -> None:
        state = {"initializer": "zeros", "trainable": False}
        self.mean = self.add_weight(shape=shape[-1:], name="mean", **state)
        self.calls = self.add_weight(shape=(), dtype="int32", name="calls", **state)
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, values: Any, training: bool | None = None) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(values, axis=(0, 1)))
            self.calls.assign_add(1)
            self.add_loss(0.1 * keras.ops.mean(values**2))
        return (values - self.mean) * self.scale


def tied() -> keras.Model:
    """One variable in three stages: of a layer that is called twice, of another layer, and of none."""
    embedding = MADE.Embedding(VOCABULARY, 8, name="embedding", embeddings_regularizer="l2")
    hidden = MADE.Dense(8, name="hidden", kernel_constraint="unit_norm", activity_regularizer="l2")
    inputs = keras.Input((None,), dtype="int32")
    values = MADE.Dense(8, name="first", kernel_regularizer="l2")(hidden(embedding(inputs)))
    logits = Tied(embedding, name="tied")(hidden(MADE.Dense(8, name="middle")(values)))
    direct = keras.ops.einsum("btd,vd->btv", logits @ embedding.embeddings, embedding.embeddings)
    return keras.Model(inputs, MADE.Dense(VOCABULARY, name="last")(direct))


def noisy() -> keras.Model:
    between = [MADE.Dense(8), MADE.Dropout(0.3), MADE.Dense(8), Noise(), MADE.Dense(VOCABULARY)]
    return keras.Sequential([keras.Input((TOKENS,)), MADE.Reshape((TOKENS, 1)), MADE.Dense(8), Noise(), *between])


def stateful() -> keras.Model:
    embedding = [keras.Input((TOKENS,), dtype="int32"), MADE.Embedding(VOCABULARY, 8), Centred()]
    return keras.Sequential([*embedding, MADE.Dense(8), MADE.BatchNormalization(), Centred(), MADE.Dense(VOCABULARY)])


@pytest.fixture
def in_stages(tmp_path, monkeypatch) -> Callable[..., InStages]:
    """Prepares a training in stages."""
    monkeypatch.setattr(memory, "load", lambda split: split)

    def prepare(new_model: Callable[[], keras.Model], data: Any = None, stages: int = 3, **values: Any) -> InStages:
        return InStages(new_model, data or examples(), config(**values), stages=stages, folder=tmp_path)

    return prepare


def assert_equals_one_device(one: InStages, steps: int = 3) -> None:
    losses = one.losses(0, steps)
    other = Reference(one.own_model, one.data, one.config)
    np.testing.assert_allclose(losses, other.losses(0, steps), rtol=2e-6)
    for actual, expected in zip(one.model.variables, other.model.variables, strict=True):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-4, atol=2e-6, err_msg=actual.path)


@pytest.mark.slow
def test_a_variable_of_several_stages_is_updated_once_by_the_sum_of_its_gradients(in_stages):
    optimizer = {"name": "adamw", "weight_decay": 0.1, "clip_norm": 0.3, "ema": 0.9}
    one = in_stages(tied, optimizer=optimizer, pipeline={"schedule": "1f1b", "cut": "middle,last"})
    shared = {variable.path: users for variable, users in one.division.shared}
    assert {"embedding/embeddings": [0, 1], "hidden/kernel": [0, 1], "hidden/bias": [0, 1]} == shared
    assert_equals_one_device(one)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_layers_that_share_a_random_generator_draw_what_they_do_on_one_device(in_stages, remat):
    assert_equals_one_device(in_stages(noisy, examples("float32"), pipeline={"remat": remat}))


@pytest.mark.slow
def test_the_state_of_a_layer_and_the_losses_it_adds_are_those_of_one_device(in_stages):
    assert_equals_one_device(in_stages(stateful, optimizer={"name": "sgd"}))


@pytest.mark.slow
def test_pipedream_keeps_the_learning_rate_of_a_schedule_for_a_whole_step(in_stages):
    settings = {"schedule": "cosine", "warmup_steps": 2, "decay_steps": 5, "end_share": 0.1}
    one = in_stages(noisy, examples("float32"), stages=1, pipeline={"schedule": "pipedream"}, optimizer=settings)
    losses = [*one.losses(0, 2), *one.losses(2, 3)]  # the optimizer counts steps, also in between
    assert 5 == int(one.optimizer.iterations)
    rates = [float(one.optimizer._learning_rate(step)) for step in range(5)]
    other = Reference(one.own_model, one.data, one.config)
    np.testing.assert_allclose(losses, other.losses_of_updates(rates), rtol=1e-5)
