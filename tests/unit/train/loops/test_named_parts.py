"""A model with several inputs and outputs: tried before anything starts, trained, evaluated and exported by name."""

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from tests.support import own_module
from train import prediction
from train.config import TrainConfig
from train.data import opening
from train.data.prepare import preparation
from train.data.sources import Source
from train.loops import evaluation
from train.model import export, models, objectives
from train.settings.parts import Optimizer
from train.startup import model_checks

N, BATCH = 48, 12
LOSS = "kind=sparse_categorical_crossentropy,size=mean_squared_error"


def data() -> dict[str, Any]:
    """Return a picture and two tokens, of which follow a class and a quantity."""
    random = np.random.default_rng(0)
    kinds_N = random.integers(0, 3, N)
    tokens_N2 = np.stack([kinds_N, random.integers(0, 3, N)], 1).astype(np.int32)
    images_N22 = random.integers(0, 255, (N, 2, 2)).astype(np.uint8)
    split = {"image": images_N22, "tokens": tokens_N2}, {"kind": kinds_N, "size": images_N22[:, 0, 0] / 255}
    return {"train": split, "test": split, "classes": {"kind": ["a", "b", "c"]}}


def model(feature_shape: dict[str, tuple[int, ...]], num_outputs: dict[str, int]) -> keras.Model:
    layers = keras.layers
    image = keras.Input(feature_shape["image"], name="image")
    tokens = keras.Input(feature_shape["tokens"], dtype="int32", name="tokens")
    values = layers.Flatten()(layers.Embedding(3, 4)(tokens))
    hidden = layers.Concatenate()([layers.Rescaling(1 / 255)(layers.Flatten()(image)), values])
    outputs = {name: layers.Dense(count)(hidden) for name, count in num_outputs.items()}
    return keras.Model({"image": image, "tokens": tokens}, outputs)


def metrics() -> dict[str, Any]:
    """Return functions, one of them to booleans, which Keras averages as well."""
    return {"both": lambda labels, outputs: labels["size"] < outputs["kind"][:, 0] + 1e9}


@pytest.fixture
def own(monkeypatch) -> Any:
    values = {"data": data, "model": model, "metrics": metrics, "summed": lambda labels, outputs: labels["size"]}
    return own_module.put(monkeypatch, "own_named", **values)


def config(**more: Any) -> TrainConfig:
    named = {"dataset": "own_named:data", "model": "own_named:model", "loss": LOSS}
    optimizer = Optimizer(learning_rate=0.1, warmup_steps=0)
    return TrainConfig(**named | {"global_batch": BATCH, "optimizer": optimizer} | more).check()


def objective_of(source: Source, **more: Any) -> objectives.Objective:
    return objectives.build_configured(config(**more), classifies=source.classifies)


@pytest.fixture
def source(own, tmp_path) -> Source:
    preparation.prepare_dataset("own_named:data", tmp_path)
    return opening.open_source(config(), tmp_path)


def test_it_is_tried_evaluated_exported_and_predicted_by_name(source, tmp_path, make_run):
    model_checks.check_parts(config(metrics="own_named:metrics"), strategy="one", data_dir=tmp_path)
    objective = objective_of(source, metrics="own_named:metrics")
    built = models.build_configured(config(), source.feature_shape, source.num_outputs)
    results = evaluation.new_evaluation(None, built, objective, source, 500)()
    assert {f"eval_{name}" for name in objective.reported} == set(results)
    heads = {"eval_kind_loss", "eval_size_loss", "eval_kind_accuracy", "eval_size_absolute_error"}
    assert {"eval_loss", "eval_both"} | heads == set(results)
    assert results["eval_loss"] == pytest.approx(results["eval_kind_loss"] + results["eval_size_loss"])
    assert 1.0 == results["eval_both"]
    run, example = make_run(workers=0), tmp_path / "example.json"
    export.export(built, run.export, source.feature_shape, source.named_outputs)
    serve = tf.saved_model.load(str(run.export)).signatures["serving_default"]
    features, _ = data()["test"]
    outputs = serve(image=tf.constant(features["image"], tf.float32), tokens=tf.constant(features["tokens"]))
    expected = built(features)
    assert set(expected) == set(outputs)
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-5)
    example.write_text(json.dumps({"image": [[0, 9], [7, 1]], "tokens": [1, 2]}))
    heads = [line.split(":")[0] for line in prediction.predict(run, None, example)]
    assert ["kind"] * 3 + ["size"] == heads
    example.write_text(json.dumps({"image": [1, 2], "tokens": [1, 2]}))
    with pytest.raises(UsageError, match="image"):
        prediction.predict(run, None, example)


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"loss": "sparse_categorical_crossentropy"}, "--loss"),
        ({"loss": "kind=sparse_categorical_crossentropy"}, "--loss"),
        ({"loss": LOSS + ",colour=mean_squared_error"}, "--loss 'colour'"),
        ({"loss_weights": "sizes=2"}, "--loss-weights 'sizes'.*did you mean 'size'"),
        ({"loss": "own_named:summed", "loss_weights": "size=2"}, "--loss-weights"),
        ({"loss": "own_named:summed", "loop": "fit"}, "--loss own_named:summed with --loop fit"),
        ({"loss": "a="}, "--loss"),
        ({"loss": "a=b,a=c"}, "--loss"),
        ({"loss_weights": "a"}, "--loss-weights"),
        ({"loss_weights": "a=-1"}, "--loss-weights"),
    ],
)
def test_losses_that_are_malformed_or_do_not_fit_the_heads_are_refused(source, more, option):
    with pytest.raises(UsageError, match=f"^{option}"):
        objective_of(source, **more)


def test_heads_are_refused_where_the_labels_have_none():
    with pytest.raises(UsageError, match="^--loss"):
        objectives.build_configured(config(), classifies=True)


def test_a_model_whose_outputs_are_not_the_labels_is_refused(own, source, tmp_path):
    def other(feature_shape: Any, num_outputs: Any) -> keras.Model:
        plain = model(feature_shape, num_outputs)
        return keras.Model(plain.input, {"kind": plain.output["kind"], "price": plain.output["size"]})

    own.model = other
    assert source.num_outputs
    with pytest.raises(UsageError, match="kind, price"):
        model_checks.check_parts(config(), strategy="one", data_dir=tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"classes": ["a", "b", "c"]},
        {"classes": {"kinds": ["a", "b", "c"]}},
        {"classes": {"size": ["a"]}},
        {"train": (data()["train"][0], {"kind": np.zeros(N, int), "the size": np.zeros(N)})},
    ],
)
def test_data_whose_names_do_not_fit_is_refused(own, tmp_path, wrong):
    own.data = lambda: data() | wrong
    with pytest.raises(UsageError, match="^dataset own_named:data"):
        preparation.prepare_dataset("own_named:data", tmp_path)
