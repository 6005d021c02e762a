"""Parts that do not fit, or that a step cannot divide, are refused first; more: `tests/differential/refused.py`."""

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract import spec
from cluster.host.launch import configuration
from cluster.system.errors import UsageError
from tests.support import own_module
from train.config import Optimizer, TrainConfig
from train.data import opening
from train.data.function.examine import examine_function
from train.data.prepare import preparation
from train.model import models
from train.startup import model_checks, model_sizes

layers = keras.layers


class Keeps(layers.Layer):
    """Has variables that Keras does not make, and does something with them in `call`."""

    def __init__(self, kept: Any, act: Callable[[Any, Any], Any] = lambda _kept, inputs: inputs) -> None:
        super().__init__(name="keeps")
        self.kept, self.act = kept, act

    def call(self, inputs: Any) -> Any:
        return self.act(self.kept, inputs)


def add_1(variable: Any, inputs: Any) -> Any:
    variable.assign(variable + 1.0)
    return inputs


class Assigns(layers.Layer):
    """Assigns its state inside a condition."""

    def build(self, _shape: Any) -> None:
        self.seen = self.add_weight(initializer="zeros", trainable=False, name="seen")

    def call(self, inputs: Any) -> Any:
        tf.cond(tf.reduce_any(inputs > 0), lambda: self.seen.assign(1.0), lambda: 1.0)
        return inputs


class Recomputed(layers.Layer):
    """Uses weights inside a function with a custom gradient."""

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(2)
        self.inner.build(shape)

    def call(self, inputs: Any) -> Any:
        return tf.recompute_grad(lambda values: tf.matmul(values, self.inner.kernel))(inputs)


class ByLoss(layers.Layer):
    """Has a weight that only its loss uses, as the codebook of a VQ-VAE."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(shape=shape[1:], name="center")

    def call(self, inputs: Any) -> Any:
        self.add_loss(tf.reduce_mean(tf.square(tf.stop_gradient(inputs) - self.center)))
        return inputs


class Moving(ByLoss):
    """Assigns its weight."""

    def call(self, inputs: Any) -> Any:
        self.center.assign(tf.reduce_mean(inputs, axis=0))
        return inputs


class Penalized(keras.Model):
    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(*arguments, **named) + 1.0


def untrained(value: Any, **how: Any) -> tf.Variable:
    return tf.Variable(value, trainable=False, **how)


def chain(*parts: Any) -> Callable[..., keras.Model]:
    return lambda shape, _outputs, **batch: keras.Sequential(
        [keras.Input(shape, **batch), *(part() for part in parts), layers.Dense(2)]
    )


def of_int32(shape: Any, outputs: Any) -> keras.Model:
    inputs = keras.Input(shape, dtype="int32")
    return keras.Model(inputs, layers.Dense(outputs)(inputs))


def in_half(shape: Any, outputs: Any) -> keras.Model:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return keras.Sequential([keras.Input(shape), layers.Dense(outputs, dtype="float32")])
    finally:
        keras.mixed_precision.set_global_policy("float32")


def compiled(shape: Any, outputs: Any) -> keras.Model:
    model = keras.Sequential([keras.Input(shape), layers.Dense(outputs)])
    model.compile("sgd", "mse")
    return model


class WithTestStep(keras.Sequential):
    def test_step(self, data: Any) -> dict[str, Any]:
        return {"loss": tf.reduce_mean(self(data[0]))}


def penalized(shape: Any, outputs: Any) -> keras.Model:
    inputs = keras.Input(shape)
    return Penalized(inputs, layers.Dense(outputs)(inputs))


def with_optimizer(shape: Any, outputs: Any, *, built: bool = False) -> keras.Model:
    model = penalized(shape, outputs)
    model.other = keras.optimizers.SGD()
    if built:
        model.other.build(model.trainable_variables)
    return model


def of_pairs(labels: Any, outputs: Any) -> Any:
    return tf.square(tf.cast(labels, tf.float32) - outputs[:, :1])


def of_pair_means(labels: Any, outputs: Any) -> Any:
    return tf.reduce_mean(of_pairs(labels, outputs), -1)


def of_batch(labels: Any, outputs: Any) -> Any:
    each = entropy(labels, tf.nn.softmax(outputs))
    return each / tf.reduce_sum(each)


def entropy(labels: Any, outputs: Any) -> Any:
    return -tf.math.log(tf.gather(outputs, labels, batch_dims=1))


def ignoring(labels: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True, ignore_class=1)


def of_sequence(_labels: Any, outputs: Any) -> Any:
    return tf.reduce_sum(outputs[0], -1)


def of_masked_sequence(labels: Any, outputs: Any) -> Any:
    values = of_sequence(labels, outputs)
    values._keras_mask = outputs[0]._keras_mask
    return values


def fails(labels: Any, outputs: Any) -> Any:
    raise ValueError("a\x1b[2Jb")


def of_two(shape: Any, outputs: Any) -> keras.Model:
    inputs = keras.Input(shape, dtype="int32")
    sequence = layers.Embedding(10, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, (sequence, layers.Dense(outputs)(layers.GlobalAveragePooling1D()(sequence))))


MODELS = {
    "plain": chain(),
    "conditional": chain(Assigns),
    "in_half": in_half,
    "compiled": compiled,
    "tested": lambda shape, outputs: WithTestStep([keras.Input(shape), layers.Dense(outputs)]),
    "of_probabilities": lambda shape, k: keras.Sequential([keras.Input(shape), layers.Dense(k, "softmax")]),
    "penalized": penalized,
    "stateful": lambda shape, outputs: chain(
        lambda: layers.Reshape((1, 2)), lambda: layers.LSTM(2, stateful=True, name="memory")
    )(shape, outputs, batch_size=2),
    "with_optimizer": with_optimizer,
    "with_built_optimizer": functools.partial(with_optimizer, built=True),
    "inside": chain(lambda: Keeps({"a": [untrained(0.0)]}, lambda kept, inputs: add_1(kept["a"][0], inputs))),
    "summed": chain(lambda: Keeps(untrained(0.0, aggregation=tf.VariableAggregation.SUM), add_1)),
    "of_keras": chain(lambda: Keeps(keras.Variable(0.0, trainable=False), add_1)),
    "normalized": chain(layers.BatchNormalization),
    "of_int32": of_int32,
    "of_two": of_two,
    "in_float8": chain(lambda: layers.Dense(4, dtype="float8_from_float32")),
    "in_bfloat16": chain(lambda: layers.Dense(4, dtype="bfloat16")),
    "recomputed": chain(Recomputed),
    "by_loss": chain(ByLoss),
    "of_scalars": lambda shape, _: keras.Sequential([keras.Input(shape), layers.Dense(1), layers.Reshape(())]),
    "moving": chain(Moving),
    "spectral": chain(lambda: layers.SpectralNormalization(layers.Dense(2))),
    "uncalled": chain(lambda: Keeps(layers.SpectralNormalization(layers.Dense(2)), lambda kept, inputs: inputs)),
    "drawing": chain(lambda: layers.Lambda(lambda values: values + tf.random.normal(tf.shape(values)))),
    "of_tensorflow": chain(lambda: Keeps(tf.Variable(1.0), lambda kept, inputs: inputs + kept)),
    "growing": chain(lambda: Keeps([untrained(tf.zeros([0, 2]), shape=[None, 2])])),
    "of_words": chain(lambda: Keeps([untrained(["a", "b"])])),
    "of_text": chain(lambda: Keeps([untrained("a")])),
}


ACCUMULATING = Optimizer("tried_parts:accumulating")
LISTED = {"source": "function", "dataset": "tried_parts:listed", "num_outputs": 2}
MASKED = {"loss": "tried_parts:of_masked_sequence"}
IGNORING = {"loss": "tried_parts:ignoring"}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tries a model of the above on some replicas."""
    losses = (of_pairs, of_pair_means, of_batch, entropy, fails, ignoring, of_sequence, of_masked_sequence)
    module = own_module.put(monkeypatch, "tried_parts", **MODELS, **{loss.__name__: loss for loss in losses})
    module.scalar = lambda labels, outputs: tf.reduce_mean(outputs)
    module.of_classes = lambda labels, outputs: tf.reduce_mean(outputs, 0)
    module.of_list = lambda labels, outputs: -tf.nn.softmax(tf.cast(labels, tf.float32)) * tf.nn.log_softmax(outputs)
    module.of_logarithms = lambda labels, outputs: of_pair_means(labels, tf.math.log(outputs[:, 1:]))
    module.of_as_many = lambda labels, outputs: tf.cast(labels, tf.float32) * outputs
    module.of_second = lambda labels, outputs: ignoring(labels, outputs[1])
    module.noisy = lambda labels, outputs: outputs[:, 0] + tf.random.uniform([])
    module.counts, module.generator = tf.Variable(0.0, name="counts"), keras.random.SeedGenerator(1)
    module.counting = lambda labels, outputs: outputs[:, 0] + module.counts.assign_sub(1.0)
    module.drawing_by_keras = lambda labels, outputs: outputs[:, 0] + keras.random.uniform([], seed=module.generator)
    module.accumulating = lambda rate: keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
    module.listed = lambda split, shard: [(np.array([0.0, 1.0]), 0)] * 2
    module.metrics = lambda: {"pairs": of_pairs}

    def of(
        model: str, replicas: int = 1, largest: int = 9, divisor: int = 0, strategy: str = "mirrored", **more: Any
    ) -> None:
        split = np.array([[0, 1], [largest, 3]]), np.array([0, 1])
        module.data = lambda: {"train": split, "test": split}
        preparation.prepare_dataset("tried_parts:data", tmp_path)
        own = {"dataset": "tried_parts:data", "model": f"tried_parts:{model}", "global_batch": 2 * replicas}
        config = TrainConfig(**own | more)
        if config.source == "function":
            examine_function(config.dataset, tmp_path, "2")
        parts = {"replicas": replicas, "batch_divisor": divisor or replicas}
        model_checks.check_parts(config, strategy=strategy, data_dir=tmp_path, **parts)

    return of


@pytest.mark.parametrize(
    ("model", "taken", "refused", "named"),
    [
        ("inside", {}, {"replicas": 2, "divisor": 1}, "^--global-batch: .* 4 examples"),
        ("inside", {"replicas": 2, "divisor": 1, "global_batch": 2}, {"replicas": 2}, r"keeps.kept\['a'\]\[0\]"),
        ("summed", {"replicas": 2}, {"micro_batches": 2}, "keeps.kept"),
        ("conditional", {}, {"replicas": 2}, "/seen"),
        ("plain", {"optimizer": ACCUMULATING}, {"optimizer": ACCUMULATING, "replicas": 2}, "gradient_accumulation"),
        ("of_int32", {"largest": 2**31 - 1}, {"largest": 2**31}, str(2**31)),
        ("plain", {"global_batch": 4, "replicas": 2}, {"global_batch": 3}, "expected 1 to 2"),
        ("plain", {"global_batch": 8, "micro_batches": 4}, {"global_batch": 8, "micro_batches": 2}, "expected 1 to 2"),
        ("plain", LISTED, LISTED | {"global_batch": 4, "micro_batches": 2}, "expected 1 to 2"),
        ("plain", {}, {"loss": "tried_parts:scalar"}, "--loss"),
        ("plain", {}, {"loss": "tried_parts:of_classes"}, r"returns \(2,\) for 3 examples"),
        ("plain", {}, {"loss": "tried_parts:fails"}, "--loss"),
        ("plain", {}, {"loss": "keras.losses:Huber"}, "--loss .* is a class"),
        ("in_half", {"precision": "fp16"}, {}, "--precision fp16"),
        ("stateful", None, {}, "'memory' is stateful"),
        ("with_optimizer", None, {"loop": "fit"}, r"Penalized.other .* build\(variables\)"),
        ("moving", {"replicas": 2}, {"micro_batches": 2}, "assigns the weight .*/center"),
        ("in_float8", None, {}, "float8"),
        ("in_bfloat16", {"replicas": 2}, {"replicas": 2, "strategy": "multiworker"}, "kernel .* bfloat16"),
        ("growing", None, {}, r"keeps.kept\[0\]"),
        ("of_words", None, {}, r"keeps.kept\[0\]"),
        ("recomputed", {}, {"bitwise_elastic": 2}, "--bitwise-elastic: the gradient of .*kernel"),
        ("of_probabilities", {"loss": "tried_parts:entropy"}, {}, "softmax"),
        ("plain", IGNORING | {"replicas": 2}, IGNORING | {"micro_batches": 2}, "--loss .* mask"),
        ("plain", IGNORING, IGNORING | {"bitwise_elastic": 2}, "--loss .* mask"),
        ("of_two", {"loss": "tried_parts:of_second"}, {"loss": "tried_parts:of_sequence"}, "--loss .* mask"),
        ("of_two", MASKED, MASKED | {"micro_batches": 2}, "--loss .* mask"),
        ("normalized", {}, {"loss": "tried_parts:of_pairs"}, "all pairs of examples"),
        ("normalized", {"loss": "tried_parts:of_batch"}, {"loss": "tried_parts:of_pair_means"}, "all pairs"),
        ("normalized", {}, {"loss": "tried_parts:of_logarithms"}, "all pairs"),
        ("normalized", {}, {"loss": "tried_parts:of_as_many"}, "--loss .* fails on"),
        ("normalized", {}, {"metrics": "tried_parts:metrics"}, "all pairs of examples"),
    ],
)
def test_parts_that_do_not_match_or_cannot_be_divided_are_refused(check, model, taken, refused, named):
    if taken is not None:
        check(model, **taken)
    with pytest.raises(UsageError, match=named) as error:
        check(model, **refused)
    assert str(error.value).isprintable()


def test_what_trains_as_in_keras_is_not_refused(check):
    check("of_keras", replicas=2, micro_batches=2)
    check("penalized", loop="fit")
    check("compiled", loop="fit")
    check("by_loss", bitwise_elastic=2)
    check("of_scalars", loss="tried_parts:of_list")
    check("moving")
    check("of_text")
    check("spectral", replicas=2, micro_batches=2)
    check("uncalled", replicas=2)
    check("with_built_optimizer", loop="fit", replicas=2)


def test_a_default_type_other_than_float32_is_refused(check):
    keras.config.set_floatx("float64")
    try:
        with pytest.raises(UsageError, match="'float64'"):
            check("plain")
    finally:
        keras.config.set_floatx("float32")


COMPARED = "depends on the others of its batch"


@pytest.mark.parametrize(
    ("model", "more", "warning"),
    [
        ("compiled", {}, "--optimizer.name, --loss and --metrics"),
        ("tested", {}, "test_step"),
        ("of_tensorflow", {}, "keeps.kept"),
        ("drawing", {}, "RandomStandardNormal"),
        ("plain", {"loss": "tried_parts:noisy"}, "--loss .* RandomUniform"),
        ("plain", {"loss": "tried_parts:counting"}, "--loss .* assigns a variable"),
        ("plain", {"loss": "tried_parts:drawing_by_keras"}, "^$"),
        ("moving", {"replicas": 2}, "assigns the weight"),
        ("normalized", {"loss": "tried_parts:of_batch", "replicas": 2}, COMPARED),
        ("normalized", {"loss": "tried_parts:of_batch", "micro_batches": 2}, COMPARED),
        ("normalized", {"loss": "tried_parts:of_batch", "replicas": 2, "divisor": 1, "global_batch": 2}, ""),
        ("normalized", {"replicas": 2}, ""),
    ],
)
def test_what_has_no_effect_and_a_loss_that_compares_the_examples_of_a_batch_are_reported(
    check, capsys, model, more, warning
):
    check(model, **more)
    reported = capsys.readouterr().err
    assert re.search(warning, reported)
    assert (COMPARED in reported) == (COMPARED == warning)


def test_built_in_parts_are_not_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", None)
    for config in (TrainConfig(), TrainConfig(dataset="train.presets.resnet50_synthetic:imagenet", model="resnet50")):
        configuration.check_config(config.to_json(), spec.build(workers=0), {})


PARAMETERS = 121_930


@pytest.fixture
def images(monkeypatch):
    """Images of 28 x 28 in 10 classes."""
    source = SimpleNamespace(feature_shape=(28, 28, 1), num_outputs=10)
    monkeypatch.setattr(opening, "open_source", lambda config, data_dir: source)


@pytest.mark.parametrize(("optimizer", "slots"), [("adam", 2), ("sgd", 1)])
def test_sizes_are_those_of_float32_the_optimizer_s_slots_and_the_outputs_of_the_layers(images, optimizer, slots):
    value = model_sizes.measure_model(TrainConfig(optimizer=Optimizer(name=optimizer)), "one", Path("data"))
    expected = {"parameters": PARAMETERS, "weights_bytes": 4 * PARAMETERS, "gradients_bytes": 4 * PARAMETERS}
    assert expected.items() <= value.items()
    assert 0 <= value["optimizer_bytes"] - slots * 4 * PARAMETERS < 100  # its counters
    outputs = 28 * 28 + 26 * 26 * 32 + 13 * 13 * 32 + 11 * 11 * 64 + 5 * 5 * 64 + 64 + 10
    assert 4 * outputs == value["activation_bytes"]
    model = models.build_configured(TrainConfig(), (28, 28, 1), 10)
    assert 4 * outputs == model_sizes._count_activation_bytes(keras.Sequential([keras.Input((28, 28, 1)), model]))
