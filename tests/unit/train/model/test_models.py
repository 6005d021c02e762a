"""Models of the user's own: built whatever their kind, and refused in one line where training could not use them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tf_keras
from tensorflow import keras

from cluster.system.errors import UsageError
from tests.support import own_module
from train.config import TrainConfig
from train.model import models

SHAPE, OUTPUTS = (4, 5), 3


class Subclass(keras.Model):
    """Makes its variables in its layers, when it is called: `build` would make none."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(outputs)

    def call(self, features: Any, training: bool = False) -> Any:
        return self.dense(self.flatten(features))


@pytest.fixture
def build(monkeypatch) -> Callable[[Callable[..., Any]], keras.Model]:
    """Builds the model of a function of the user's."""

    def make(function: Callable[..., Any]) -> keras.Model:
        own_module.put(monkeypatch, "own_models", model=function)
        return models.build_by_name("own_models:model", SHAPE, OUTPUTS)

    return make


def flat(outputs: int) -> keras.Model:
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(outputs)])


@pytest.mark.parametrize("kind", [flat, Subclass])
def test_a_model_that_was_not_built_gets_its_variables(kind, build):
    model = build(lambda shape, outputs: kind(outputs))
    assert [(20, 3), (3,)] == [tuple(variable.shape) for variable in model.trainable_variables]
    weights = model.get_weights()
    outputs_BK = model(np.ones((2, *SHAPE), np.float32))
    np.testing.assert_allclose(outputs_BK, np.ones((2, 20)) @ weights[0] + weights[1], rtol=1e-5)


@pytest.mark.parametrize("kind", [keras.layers.Dense, tf_keras.layers.Dense, tf_keras.Sequential])
def test_a_result_that_is_not_a_model_of_keras_3_is_refused(build, kind):
    with pytest.raises(UsageError, match=f"returned {kind.__module__}.*expected a keras model; use `from tensorflow"):
        build(lambda shape, outputs: kind() if kind is tf_keras.Sequential else kind(outputs))


class Generative(keras.Model):
    """Its `compile` is called in another way."""

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(d_optimizer)


class Stepping(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize(
    ("kind", "loop", "other", "named"),
    [(Generative, "fit", "custom", "Generative"), (Stepping, "custom", "fit", "--loop fit")],
)
def test_a_method_that_the_loop_cannot_call_or_would_not_call_is_refused(monkeypatch, kind, loop, other, named):
    def own(shape: tuple[int, ...], outputs: int) -> keras.Model:
        inputs = keras.Input(shape)
        return kind(inputs, keras.layers.Dense(outputs)(inputs))

    own_module.put(monkeypatch, "own_models", model=own)
    with pytest.raises(UsageError, match=named):
        models.build_configured(TrainConfig(model="own_models:model", loop=loop), SHAPE, OUTPUTS)
    assert isinstance(models.build_configured(TrainConfig(model="own_models:model", loop=other), SHAPE, OUTPUTS), kind)


def test_a_model_that_is_built_again_to_be_exported_freezes_the_same_layers(monkeypatch):
    """Keras counts layers without a name over the whole process."""
    _, _, number = keras.layers.Dense(1).name.partition("_")
    name = f"dense_{int(number or 0) + 2}"  # of the second layer after this one
    own_module.put(monkeypatch, "own_models", model=lambda _shape, outputs: keras.Sequential([flat(4), flat(outputs)]))
    config = TrainConfig(model="own_models:model", freeze=name)
    for _ in range(3):
        model = models.build_configured(config, SHAPE, OUTPUTS)
        assert [20 * 4 + 4, 4 * OUTPUTS + OUTPUTS] == [layer.count_params() for layer in model.layers]
        assert [True, False] == [bool(layer.trainable_weights) for layer in model.layers]
    assert keras.layers.Dense(1).name not in [layer.name for layer in model._flatten_layers()]
