"""Models of the user's own: built whatever their kind, and refused in one line where training could not use them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tf_keras
from tensorflow import keras

from cluster.system.errors import UsageError
from tests.support import own_module
from train.config import TrainConfig, Transformer
from train.model import input_types, models
from train.model.architectures import transformer_lm
from train.settings.overrides import resolve_config

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


@pytest.mark.slow
def test_no_output_of_a_transformer_depends_on_a_later_token():
    model = transformer_lm((6,), 11, layers=2, width=8, heads=2)
    tokens = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
    changed = tokens.copy()
    changed[0, 4] = 9
    one, other = model(tokens).numpy(), model(changed).numpy()
    assert one[:, :4].tobytes() == other[:, :4].tobytes()
    assert not np.array_equal(one[:, 4:], other[:, 4:])


@pytest.mark.slow
def test_options_set_the_size_of_a_transformer():
    config = TrainConfig(model="transformer_lm", transformer=Transformer(layers=3, width=16, heads=2))
    model = models.build_configured(config, (8,), 256)
    attention, feed_forward, norms = 4 * 16 * 16 + 4 * 16, 2 * 64 * 16 + 64 + 16, 2 * 2 * 16
    embedding, logits = 256 * 16 + 8 * 16, 256 * 16 + 256 + 2 * 16
    assert 3 * (attention + feed_forward + norms) + embedding + logits == model.count_params()
    assert ("int32", (None, 8, 256)) == (input_types.input_dtypes(model, ()), model.output_shape)


def test_examples_of_a_transformer_must_be_sequences():
    with pytest.raises(UsageError):
        transformer_lm((28, 28, 1), 10)


@pytest.mark.parametrize(
    "words", [("--transformer.width", "10"), ("--transformer.context", "100"), ("--transformer.layers", "0")]
)
def test_a_size_that_a_transformer_cannot_have_is_refused(words):
    resolve_config("transformer_lm", ["--transformer.layers", "2"])
    with pytest.raises(UsageError):
        resolve_config("transformer_lm", words)
