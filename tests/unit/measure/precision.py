"""What clipping, loss scaling and half precision give on 1, 2 and 3 replicas: `python -m ... RESULT 3`."""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.unit.measure.replicas import (
    CLASSES,
    FEATURES,
    GLOBAL_BATCH,
    OBJECTIVE,
    SEED,
    new_model,
    prepare,
    strategy_called,
    weights_of,
)

# isort: split
import keras
import numpy as np
import tensorflow as tf

from tests.unit.measure.small_training import CLIPPED, PLAIN, STEPS, training
from train import patches
from train import strategy as strategies
from train.config import Optimizer, TrainConfig
from train.data import sources
from train.model import gradients, optimizers

STEEP = dataclasses.replace(OBJECTIVE, loss=lambda labels, outputs: 1e7 * OBJECTIVE.loss(labels, outputs))
"""Its loss is a float32, and its gradients are too large for float16 even where nothing scales them."""


def clipped_by_hand(source: sources.Source) -> list[float]:
    """Return the weights that plain TensorFlow reaches on the whole batches of `CLIPPED`."""
    done = training("one", source, PLAIN)
    model, feed = done.train_step.model, sources.train_feed(strategy_called("one"), source, 0, GLOBAL_BATCH, SEED)
    variables = [variable.value for variable in model.trainable_variables]
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss, _ = done.train_step.shares(feed.batch((), tf.constant(step, tf.int64), tf.constant(0, tf.int64)))
        slopes = tape.gradient(loss, variables)
        norm = np.sqrt(sum(float(tf.reduce_sum(gradient**2)) for gradient in slopes))
        for variable, gradient in zip(variables, slopes, strict=True):
            variable.assign_sub(PLAIN.learning_rate * gradient * min(1, CLIPPED.clip_norm / norm))
    return weights_of(model)


def overflowing(where: str, source: sources.Source, *, elastic: bool = False) -> dict[str, Any]:
    """Return the results of two steps of Adam, the first of which overflows float16."""
    done = training(where, source, Optimizer(warmup_steps=0, clip_norm=CLIPPED.clip_norm), "fp16", elastic=elastic)
    assert done.scale is not None
    done.scale.scale.assign(2.0**40)
    done.scale.good_steps.assign(7)
    before = weights_of(done.train_step.model)
    found = {}
    for step, name in enumerate(("first", "second")):
        if step:
            done.scale.scale.assign(2.0**10)
        losses = done.run(step, 1, False).losses.tolist()
        slots = [np.abs(variable.numpy()).max().item() for variable in done.train_step.policy.optimizer.variables[2:]]
        found[name] = {
            "losses": losses,
            "moved": bool(weights_of(done.train_step.model) != before),
            "slots": max(slots),
            "iterations": int(done.train_step.policy.optimizer.iterations.numpy()),
            "good": int(done.scale.good_steps.numpy()),
            **done.scale.metrics(),
        }
    return found


def exhausted(where: str, source: sources.Source) -> dict[str, Any]:
    """Return how a training ends whose gradients overflow at any scale, from 2 on."""
    done = training(where, source, PLAIN, "fp16", objective=STEEP)
    assert done.scale is not None
    done.scale.scale.assign(2.0)
    before = weights_of(done.train_step.model)
    try:
        done.run(0, STEPS, False)
    except Exception as error:  # whatever it is
        message = f"{type(error).__name__}: {error}"
    return {"message": message, "moved": weights_of(done.train_step.model) != before}


def grown(source: sources.Source) -> list[float]:
    """Return the loss scale after each of three steps, the second of which is the last before it grows."""
    done = training("one", source, PLAIN, "fp16")
    assert done.scale is not None
    done.scale.good_steps.assign(gradients.GROWS_AFTER - 2)
    scales = []
    for step in range(3):
        done.run(step, 1, False)
        scales += [float(done.scale.scale.numpy())]
    return scales


def fitted(where: str, optimizer: Optimizer, precision: str) -> list[float]:
    """Return the weights that Keras 3's `fit` reaches in three steps, on the same batch."""
    strategy = strategy_called(where)
    random = np.random.default_rng(0)
    features_BF = random.normal(size=(GLOBAL_BATCH, FEATURES)).astype(np.float32)
    labels_B = random.integers(0, CLASSES, GLOBAL_BATCH)
    with strategy.scope(), strategies.policy(precision):
        model = new_model(0)
        config = TrainConfig(optimizer=optimizer, precision=precision)
        built = optimizers.build(config)
        built.build(model.trainable_variables)
        optimizers.policy(config, built).install()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(built, loss, jit_compile=False)
        model.optimizer = built
    data = tf.data.Dataset.from_tensor_slices((features_BF, labels_B)).batch(GLOBAL_BATCH).repeat()
    model.fit(data, steps_per_epoch=3, epochs=1, verbose=0)
    return weights_of(model)


OPTIMIZERS = {
    "adamw": {"schedule": "cosine", "decay_steps": STEPS},
    "lamb": {"schedule": "linear", "decay_steps": STEPS, "weight_decay": 0.1},
    "lion": {"schedule": "polynomial", "decay_steps": STEPS, "weight_decay": 0.1, "no_decay": "bias"},
    "sgd": {"schedule": "piecewise", "boundaries": "2:0.1", "nesterov": True},
}


def averaged(where: str, source: sources.Source, name: str) -> dict[str, list[float]]:
    """Return the weights that an optimizer reaches, and their averages."""
    settings = Optimizer(name=name, learning_rate=0.05, warmup_steps=1, ema=0.5, **OPTIMIZERS[name])
    done = training(where, source, settings)
    done.run(0, STEPS, False)
    model = done.train_step.model
    with optimizers.averaged(TrainConfig(optimizer=settings), model, done.train_step.policy.optimizer):
        averages = weights_of(model)
    return {"weights": weights_of(model), "averages": averages}


def main(result: Path) -> None:
    """Measure."""
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(Path(folder))["own:weighted"]
        kinds: dict[str, tuple[Any, ...]] = {
            "plain": (PLAIN,),
            "clipped": (CLIPPED,),
            "bf16": (PLAIN, "bf16"),
            "fp16": (CLIPPED, "fp16"),
        }
        measured: dict[str, Any] = {
            kind: {"one": training("one", source, *requested).trained()} for kind, requested in kinds.items()
        }
        measured["clipped"]["mirrored-3"] = training("mirrored-3", source, CLIPPED).trained()
        measured["clipped"]["by hand"] = clipped_by_hand(source)
        measured["elastic"] = {
            where: training(where, source, CLIPPED, "fp16", elastic=True).trained() for where in ("one", "mirrored-3")
        }
        measured["overflow"] = {"central-2": overflowing("central-2", source)}
        measured["overflow"]["elastic"] = overflowing("mirrored-3", source, elastic=True)
        measured["exhausted"] = exhausted("one", source)
        places = ("one", "mirrored-3")
        measured["optimizers"] = {name: {w: averaged(w, source, name) for w in places} for name in OPTIMIZERS}
        measured["grown"] = grown(source)
        measured["fit"] = {
            "plain": fitted("one", PLAIN, "fp32"),
            "clipped": fitted("one", CLIPPED, "fp32"),
            "on replicas": fitted("mirrored-3", CLIPPED, "fp16"),
        }
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
