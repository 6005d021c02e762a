"""Models of the user's own: built whatever their kind, and refused in one line where training could not use them."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tensorflow import keras

from cluster.system.errors import UsageError
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
        module = types.ModuleType("own_models")
        module.model = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "own_models", module)
        return models.build_by_name("own_models:model", SHAPE, OUTPUTS)

    return make


Build = Callable[[Callable[..., Any]], keras.Model]


def refusal(build: Build, function: Callable[..., Any]) -> str:
    with pytest.raises(UsageError) as refused:
        build(function)
    assert 1 == len(str(refused.value).splitlines())
    return str(refused.value)


def flat(outputs: int) -> keras.Model:
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(outputs)])


def test_the_built_in_model_gives_a_logit_a_class():
    model = models.build_by_name("two_conv_cnn", (28, 28, 1), 10)
    assert (2, 10) == model(np.zeros((2, 28, 28, 1), np.float32)).shape
    assert 8 == len(model.trainable_variables)


@pytest.mark.parametrize("kind", [flat, Subclass])
def test_a_model_that_was_not_built_gets_its_variables(kind, build):
    model = build(lambda shape, outputs: kind(outputs))
    assert [(20, 3), (3,)] == [tuple(variable.shape) for variable in model.trainable_variables]
    weights = model.get_weights()
    outputs_BK = model(np.ones((2, *SHAPE), np.float32))
    np.testing.assert_allclose(outputs_BK, np.ones((2, 20)) @ weights[0] + weights[1], rtol=1e-5)


def test_a_result_that_is_not_a_model_is_refused(build):
    message = refusal(build, lambda shape, outputs: keras.layers.Dense(outputs))
    assert "expected a keras model; use `from tensorflow import keras`" in message
    assert "returned keras.src.layers.core.dense.Dense" in message


def test_a_model_of_the_other_keras_is_refused(build):
    import tf_keras  # the Keras that the chosen loop does not use

    message = refusal(build, lambda shape, outputs: tf_keras.Sequential([tf_keras.layers.Dense(outputs)]))
    assert "returned tf_keras" in message
    assert "expected a keras model" in message


class Generative(keras.Model):
    """Its `compile` is called in another way."""

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(d_optimizer)


class Stepping(keras.Model):
    """Overrides `train_step`."""

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

    module = types.ModuleType("own_models")
    module.model = own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_models", module)
    with pytest.raises(UsageError, match=named):
        models.build_configured(TrainConfig(model="own_models:model", loop=loop), SHAPE, OUTPUTS)
    assert isinstance(models.build_configured(TrainConfig(model="own_models:model", loop=other), SHAPE, OUTPUTS), kind)


def test_a_model_that_is_built_again_to_be_exported_freezes_the_same_layers(monkeypatch):
    """Keras counts layers without a name over the whole process."""
    _, _, number = keras.layers.Dense(1).name.partition("_")
    name = f"dense_{int(number or 0) + 2}"  # of the second layer after this one
    module = types.ModuleType("own_models_again")
    module.model = lambda _shape, outputs: keras.Sequential([flat(4), flat(outputs)])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_models_again", module)
    config = TrainConfig(model="own_models_again:model", freeze=name)
    for _ in range(3):
        model = models.build_configured(config, SHAPE, OUTPUTS)
        assert [20 * 4 + 4, 4 * OUTPUTS + OUTPUTS] == [layer.count_params() for layer in model.layers]
        assert [True, False] == [bool(layer.trainable_weights) for layer in model.layers]
    assert keras.layers.Dense(1).name not in [layer.name for layer in model._flatten_layers()]
