"""The loss of evaluations includes regularization, as Keras's does."""

import keras
import numpy as np

from train.context import regularization, regularized


def test_the_evaluated_loss_must_be_that_of_keras():
    keras.utils.set_random_seed(5)
    layers, l2 = keras.layers, keras.regularizers.L2(0.1)
    inner = keras.Sequential([layers.Dense(4, kernel_regularizer=l2, bias_regularizer="l1"), layers.Dense(3)])
    model = keras.Sequential([keras.Input((2,)), layers.Dense(5, kernel_regularizer=l2), inner])
    model.compile(loss="mean_squared_error")
    features, labels = np.random.default_rng(0).normal(size=(6, 2)), np.ones((6, 3))
    data_loss = float(np.mean((model.predict(features, verbose=0) - labels) ** 2))
    found = regularized(lambda: {"eval_loss": data_loss, "eval_accuracy": 1.0}, lambda: regularization(model))()
    assert 1.0 == found["eval_accuracy"]
    expected = model.evaluate(features, labels, verbose=0)
    assert data_loss + 0.1 < expected
    np.testing.assert_allclose(found["eval_loss"], expected, rtol=1e-6)
