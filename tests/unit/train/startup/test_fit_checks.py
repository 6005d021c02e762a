"""Losses of a user's own step that several replicas would add up are reported, and those that Keras divides are not."""

from typing import Any

import pytest
import tensorflow as tf
from tensorflow import keras

from train.startup import fit_checks


class Summed(keras.Sequential):
    """Has a step as in keras.io's VAE, which is for one replica."""

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0], training=True) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Averaged(Summed):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": self.divided(data)}

    @tf.function
    def divided(self, data: Any) -> Any:
        return tf.reduce_mean(self(data[0]) ** 2) / tf.distribute.get_strategy().num_replicas_in_sync


class Extended(Summed):
    def train_step(self, data: Any) -> dict[str, Any]:
        return keras.Model.train_step(self, data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, **_others: Any) -> Any:
        return tf.reduce_mean((y_pred - y) ** 2)


class Penalized(keras.Sequential):
    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(*arguments, **named) + 1.0


class ByObject(Summed):
    """Uses a loss of Keras, as in keras.io's GANs."""

    reduction = "sum_over_batch_size"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loss_fn = keras.losses.BinaryCrossentropy(reduction=self.reduction)

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": tf.reduce_mean(self.loss_fn(data[1], self(data[0])))}


class Unreduced(ByObject):
    reduction = "none"


OF_MODULE = keras.losses.MeanSquaredError()


def of_helper(labels: Any, outputs: Any) -> Any:
    return OF_MODULE(labels, outputs)


class ByHelper(Summed):
    """Uses a function of a loss of its module, as in TensorFlow's DCGAN."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": of_helper(data[1], self(data[0]))}


def enclosed() -> type[Summed]:
    losses = {"a": keras.losses.MeanSquaredError()}

    class ByClosure(Summed):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": losses["a"](data[1], self(data[0]))}

    return ByClosure


@pytest.mark.parametrize(
    ("kind", "replicas", "warns"),
    [
        *((Summed, 2, True), (Summed, 1, False), (Averaged, 2, False), (Extended, 2, False)),
        *((keras.Sequential, 2, False), (OwnLoss, 2, True), (Penalized, 2, False), (ByObject, 2, False)),
        *((ByHelper, 2, False), (enclosed(), 2, False), (Unreduced, 2, True)),
    ],
)
def test_a_loss_that_adds_up_the_gradients_of_replicas_is_reported(capsys, kind, replicas, warns):
    fit_checks.warn_of_sum(kind([keras.Input((2,)), keras.layers.Dense(1)]), replicas)
    assert ("added up" in capsys.readouterr().err) == warns
