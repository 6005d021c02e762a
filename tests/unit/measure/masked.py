"""What training and evaluation compute of padded sequences, on one device, on two, in parts; and plain Keras."""

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from train import strategy as strategies

strategies.configure_devices(2)

import tensorflow as tf  # noqa: E402
from tensorflow import keras  # noqa: E402

from cluster.contract.run.folder import RunFolder  # noqa: E402
from cluster.contract.run.heartbeat import HeartbeatWriter  # noqa: E402
from cluster.contract.spec import build  # noqa: E402
from cluster.system.journal import read_json_lines  # noqa: E402
from train import patches  # noqa: E402
from train.config import Optimizer, TrainConfig  # noqa: E402
from train.context import TaskContext, regularization, regularized  # noqa: E402
from train.data import arrays, sources  # noqa: E402
from train.data.batches import BatchSlice  # noqa: E402
from train.elastic.train_step import ElasticTrainStep  # noqa: E402
from train.elastic.virtual_shards import VirtualShards  # noqa: E402
from train.loops import steps  # noqa: E402
from train.loops.keras_fit import fit  # noqa: E402
from train.loops.train_step import TrainStep  # noqa: E402
from train.model import objectives  # noqa: E402
from train.model.gradients import GradientPolicy  # noqa: E402

EXAMPLES, LENGTH, WORDS, CLASSES, BATCH, STEPS, SEED, RATE = 36, 5, 11, 3, 12, 4, 7, 0.5


def prepare(data_dir: Path) -> sources.Source:
    """Write sequences of one word to all; what follows the last word is padding, 0, with labels that would count."""
    random = np.random.default_rng(3)
    words = random.integers(1, WORDS, (EXAMPLES, LENGTH)).astype(np.int32)
    words[np.arange(LENGTH) >= random.integers(1, LENGTH + 1, (EXAMPLES, 1))] = 0
    split = words, random.integers(0, CLASSES, (EXAMPLES, LENGTH))
    (data_dir / "scratch").mkdir(parents=True)
    where = data_dir / "scratch", data_dir, "own:masked", "1"
    arrays.write(*where, classes=(), splits={"train": split, "test": split}, source="", source_files={})
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
    result = steps.SynchronousSteps(strategy, step, feed, STEPS)(0, STEPS, False)
    measure = steps.evaluation(
        strategy, model, objective, sources.eval_feed(strategy, source, 5), num_examples=EXAMPLES, batch=5
    )
    evaluation = regularized(measure, lambda: regularization(model))()
    return {
        "losses": result.losses.tolist(),
        "scores": result.scores.tolist(),
        "weights": weights_of(model),
        "evaluated": {name.removeprefix("eval_"): value for name, value in evaluation.items()},
    }


def by_fit(folder: Path, strategy: tf.distribute.Strategy, micro_batches: int = 1) -> dict[str, Any]:
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
    run, spec = RunFolder(folder / f"run-{strategy.num_replicas_in_sync}-{micro_batches}"), build(workers=0)
    run.create()
    with strategy.scope():
        model = new_model()
    context = TaskContext(
        run=run,
        task=spec.task("chief"),
        spec=spec,
        config=config,
        source=sources.find(config, folder / "data"),
        objective=objectives.build(config.loss, classifies=True),
        strategy=strategy,
        model=model,
        new_model=new_model,
        heartbeat=HeartbeatWriter(run, spec.task("chief"), 0),
        stop=threading.Event(),
    )
    fit.Training(context).run()
    rows = list(read_json_lines(run.metrics("chief")))
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "scores": [row["accuracy"] for row in rows if "loss" in row],
        "weights": weights_of(model),
        "evaluated": {name: rows[-1][f"eval_{name}"] for name in ("loss", "accuracy")},
    }


def main(result: Path) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = prepare(folder / "data")
        found = {"keras": plainly(source)}
        patches.apply()
        one, two = tf.distribute.OneDeviceStrategy("/CPU:0"), tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
        found |= {
            "custom one": custom(source, one),
            "custom two": custom(source, two),
            "custom two, micro-batches": custom(source, two, micro_batches=3),
            "elastic two": custom(source, two, shards=3, micro_batches=2),
            "fit one": by_fit(folder, one),
            "fit two": by_fit(folder, two),
            "fit two, micro-batches": by_fit(folder, two, micro_batches=3),
        }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
