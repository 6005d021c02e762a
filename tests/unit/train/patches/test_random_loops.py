"""Random layers draw from their place in the training, which iterations of a loop share."""

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from cluster.system.errors import UsageError
from train.loops import fit
from train.patches import placed_seeds, symbolic_build

layers = keras.layers


class Cell(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.state_size, self.dropout = 2, layers.Dropout(0.5)

    def call(
        self, inputs: tf.Tensor, states: list[tf.Tensor], training: bool = False
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        outputs = self.dropout(inputs, training=training)
        return outputs, [outputs]


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.random.SeedGenerator, "next", placed_seeds._next_seed)


def trace(layer: keras.Layer) -> None:
    """Call a layer in a step inside a loop, as steps are."""
    inputs = tf.ones([3, 4, 2])
    layer(inputs)  # builds it

    def step(done: tf.Tensor) -> tf.Tensor:
        with placed_seeds.random_place(done, tf.zeros([], tf.int64)):
            layer(inputs, training=True)
        return done + 1

    tf.function(lambda: tf.while_loop(lambda done: done < 2, step, [tf.zeros([], tf.int64)])).get_concrete_function()


def test_a_draw_in_each_iteration_of_a_loop_is_refused() -> None:
    with pytest.raises(UsageError, match="inside a loop"):
        trace(layers.RNN(Cell()))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.LSTM(2, dropout=0.5, recurrent_dropout=0.5),
        lambda: layers.Bidirectional(layers.RNN([layers.GRUCell(2, dropout=0.5), layers.LSTMCell(2, dropout=0.5)])),
        lambda: layers.TimeDistributed(layers.Dropout(0.5)),
        layers.RandomElasticTransform,  # combines the seed with whole numbers
    ],
)
def test_layers_that_draw_before_their_loop_are_not_refused(layer: Callable[[], keras.Layer]) -> None:
    trace(layer())


class Noisy(keras.Model):
    """Does not call the optimizer that it was compiled with, like a GAN with one for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.generator = layers.Dense(1), keras.random.SeedGenerator(1)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.dense(inputs)

    def train_step(self, _data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {"loss": keras.random.uniform((), seed=self.generator)}


class Careless(Noisy):
    def train_step(self, _data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {"loss": tf.random.normal(())}


def test_a_step_that_draws_from_tensorflow_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = Careless()
    model.compile("sgd", "mse")
    fit.separate_steps(model, 0)
    for size in (1, 2):
        model.train_on_batch(tf.ones([size, 2]), tf.ones([size, 1]))
    assert 1 == capsys.readouterr().err.count("Careless.train_step draws by")


def test_a_step_of_fit_draws_by_its_number_with_any_optimizer() -> None:
    drawn: dict[int, list[float]] = {}
    for first in (0, 1):
        model, drawn[first] = Noisy(), []
        model.compile("sgd", "mse")
        fit.separate_steps(model, first)
        for _ in range(3):
            drawn[first].append(model.train_on_batch(tf.ones([1, 2]), tf.ones([1, 1])))
    assert len({*drawn[0]}) == 3
    assert drawn[0][1:] == drawn[1][:2]


def test_fit_takes_a_metric_that_creates_its_variables_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    f1 = keras.metrics.F1Score("micro")
    monkeypatch.setattr(Noisy, "train_step", lambda _, data: f1.update_state(data[1], data[0]) or {"loss": f1.result()})
    monkeypatch.setattr(*symbolic_build.REPLACED[0][:3])
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        model = Noisy()
        model.f1 = f1
        model.compile("sgd", "mse", metrics=["mae"])
    assert [1.0] == pytest.approx(model.fit(tf.eye(2), tf.eye(2), verbose=0).history["loss"])
