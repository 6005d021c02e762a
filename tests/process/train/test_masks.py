"""A mask that reaches the output: padding counts neither in the loss nor in a score, as in Keras on one device."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.spec import build
from cluster.system.json_files import read_json_lines
from tests.support.small_training import strategy_called
from train import patches
from train.config import Optimizer, TrainConfig
from train.context import TaskContext, regularization, regularized
from train.data import arrays, sources
from train.data.batches import BatchSlice
from train.elastic.shard_step import ElasticTrainStep
from train.elastic.virtual_shards import VirtualShards
from train.loops import fit, steps
from train.loops.train_step import TrainStep
from train.model import masks, objectives
from train.model.gradients import GradientPolicy

DEVICES = 2
EXAMPLES, LENGTH, WORDS, CLASSES, BATCH, STEPS, SEED, RATE = 36, 5, 11, 3, 12, 4, 7, 0.5


def prepare(data_dir: Path) -> sources.Source:
    """Write sequences of one word to all; what follows the last word is padding, 0, with labels that would count."""
    random = np.random.default_rng(3)
    words = random.integers(1, WORDS, (EXAMPLES, LENGTH)).astype(np.int32)
    words[np.arange(LENGTH) >= random.integers(1, LENGTH + 1, (EXAMPLES, 1))] = 0
    split = words, random.integers(0, CLASSES, (EXAMPLES, LENGTH))
    arrays.write(data_dir, "own:masked", "1", {"train": split, "test": split})
    return sources.find(TrainConfig(dataset="own:masked"), data_dir)


def new_model() -> keras.Model:
    """Return a model whose mask reaches its output, with regularisation, which no number of positions may scale."""
    keras.utils.set_random_seed(SEED)
    layers = keras.layers
    words = keras.Input((LENGTH,), dtype="int32")
    values = layers.Embedding(WORDS, 4, mask_zero=True, embeddings_regularizer=keras.regularizers.L2(0.01))(words)
    return keras.Model(words, layers.Dense(CLASSES)(layers.Dense(6, "tanh")(values)))


def weights_of(model: keras.Model) -> list[float]:
    return np.concatenate([variable.numpy().reshape(-1) for variable in model.trainable_variables]).tolist()


def plainly(source: sources.Source) -> dict[str, Any]:
    """Return Keras's results for the same batches."""
    model = new_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss, metrics=["accuracy"])
    losses, scores = [], []
    for batch in source.train_dataset(BatchSlice(BATCH, SEED, num_steps=STEPS)):
        logs = model.train_on_batch(batch.features.numpy(), batch.labels.numpy(), return_dict=True)
        losses.append(float(logs["loss"]))
        scores.append(float(logs["accuracy"]))
        model.reset_metrics()
    (whole,) = source.eval_dataset(EXAMPLES, sources.Replicas())
    model.compile(loss=loss, metrics=["accuracy"])
    evaluated = model.evaluate(whole.features.numpy(), whole.labels.numpy(), EXAMPLES, verbose=0, return_dict=True)
    return {"losses": losses, "scores": scores, "weights": weights_of(model), "evaluated": evaluated}


def custom(
    source: sources.Source, strategy: tf.distribute.Strategy, micro_batches: int = 1, shards: int = 0
) -> dict[str, Any]:
    """Return the results of the custom loop."""
    objective = objectives.build("sparse_categorical_crossentropy", classifies=True)
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = new_model()
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    what = model, GradientPolicy(optimizer), objective, BATCH
    cut = VirtualShards(shards, replicas) if shards else None
    step = (
        ElasticTrainStep(*what, shards, micro_batches, shards=cut) if cut else TrainStep(*what, replicas, micro_batches)
    )
    feed = sources.train_feed(strategy, source, 0, BATCH, SEED, cut, micro_batches)
    result = steps.SynchronousSteps(strategy, step, feed, STEPS)(0, STEPS)
    measure = steps.evaluation(
        strategy, model, objective, sources.eval_feed(strategy, source, 5), num_examples=EXAMPLES, batch=5
    )
    evaluation = regularized(measure, lambda: regularization(model))()
    return {
        "losses": result.losses.tolist(),
        "scores": result.values["accuracy"].tolist(),
        "weights": weights_of(model),
        "evaluated": {name.removeprefix("eval_"): value for name, value in evaluation.items()},
    }


def by_fit(data_dir: Path, strategy: tf.distribute.Strategy, micro_batches: int = 1) -> dict[str, Any]:
    """Return the results of `--loop fit`."""
    config = TrainConfig(
        dataset="own:masked",
        loop="fit",
        global_batch=BATCH,
        max_steps=STEPS,
        seed=SEED,
        log_every=1,
        epochs=100,
        micro_batches=micro_batches,
        optimizer=Optimizer("sgd", RATE, momentum=0.0, warmup_steps=0),
    )
    run, spec = RunFolder(data_dir.parent / f"run-{strategy.num_replicas_in_sync}-{micro_batches}"), build(workers=0)
    run.create()
    with strategy.scope():
        model = new_model()
    context = TaskContext(
        run=run,
        task=spec.task("chief"),
        spec=spec,
        config=config,
        source=sources.find(config, data_dir),
        objective=objectives.build(config.loss, classifies=True),
        strategy=strategy,
        model=model,
        new_model=new_model,
        heartbeat=HeartbeatWriter(run, spec.task("chief"), 0),
        stop=threading.Event(),
    )
    fit.train(context)
    rows = list(read_json_lines(run.metrics("chief")))
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "scores": [row["accuracy"] for row in rows if "loss" in row],
        "weights": weights_of(model),
        "evaluated": {name: rows[-1][f"eval_{name}"] for name in ("loss", "accuracy")},
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("masked") / "data"


@pytest.fixture(scope="module")
def source(data_dir) -> sources.Source:
    return prepare(data_dir)


@pytest.fixture(scope="module")
def of_keras(source) -> dict[str, Any]:
    """What Keras comes to before it is patched."""
    computed = plainly(source)
    patches.apply()
    return computed


@pytest.mark.parametrize(
    ("how", "where", "parts"),
    [
        (custom, "one", {}),
        (custom, "mirrored-2", {}),
        (custom, "mirrored-2", {"micro_batches": 3}),
        (custom, "mirrored-2", {"shards": 3, "micro_batches": 2}),
        (by_fit, "one", {}),
        (by_fit, "mirrored-2", {}),
        (by_fit, "mirrored-2", {"micro_batches": 3}),
    ],
)
def test_padded_sequences_train_and_evaluate_as_in_keras_on_one_device(of_keras, source, data_dir, how, where, parts):
    """However unevenly replicas, micro-batches and virtual shards hold the padding."""
    computed = how(data_dir if how is by_fit else source, strategy_called(where), **parts)
    for name in ("losses", "scores", "weights"):
        np.testing.assert_allclose(computed[name], of_keras[name], rtol=2e-5, atol=1e-6, err_msg=name)
    for name in ("loss", "accuracy"):
        assert computed["evaluated"][name] == pytest.approx(of_keras["evaluated"][name], rel=1e-5)


def test_the_mask_of_a_nested_model_is_expected_where_its_symbolic_output_has_none():
    layers = keras.layers
    inner = keras.Sequential([keras.Input((3, 4)), layers.Dense(4)])
    model = keras.Sequential([keras.Input((3,)), layers.Embedding(5, 4, mask_zero=True), inner, layers.Dense(2)])
    assert masks.of(model(tf.ones([1, 3]))) is not None
    assert any(masks.begins_at(layer) for layer in model._flatten_layers())
    assert not any(masks.begins_at(layer) for layer in inner._flatten_layers())


def test_the_mask_that_a_function_makes_is_expected():
    layers = keras.layers
    assert masks.begins_at(layers.Lambda(lambda inputs: inputs, mask=lambda inputs, mask=None: inputs[..., 0] > 0))
    assert not masks.begins_at(layers.Lambda(lambda inputs: inputs))


def test_an_example_of_padding_alone_counts_nothing():
    values = tf.constant([[1.0, 2.0], [8.0, np.nan], [np.inf, 3.0]])
    mask = tf.constant([[True, True], [True, False], [False, False]])
    np.testing.assert_allclose(masks.by_example(values, mask), [3.0, 8.0, 0.0])  # 3 positions of 3 examples
    np.testing.assert_allclose(masks.by_example(values[:1], mask[2:]), [0.0])
