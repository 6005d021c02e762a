"""The speed of six kinds of users' models with the default `--onednn auto`, against `--onednn off`.

This module also plays the user: it has the models and their data, such as `benchmarks.own_models:cnn`. Each run trains
a chief alone to its end, and the weights of a model must have the same hash in all of its runs with the same setting.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Goal, ratios, step_seconds
from benchmarks.runs import Bench
from cluster.system.errors import RunFailed

STEPS, BATCH = 150, 64
MODELS = {"cnn": "images", "unet": "images", "separable": "images", "transformer": "series", "recurrent": "series"}
MODELS |= {"dense": "rows"}
AUTO, OFF = "--onednn=auto", "--onednn=off"


def measure(bench: Bench) -> list[Figure]:
    """Train each model alternately with both settings."""
    seconds: dict[str, dict[str, list[float]]] = {name: {AUTO: [], OFF: []} for name in MODELS}
    hashes: dict[tuple[str, str], set[str]] = {}
    for turn in bench.turns():
        for name, data in MODELS.items():
            for setting, samples in seconds[name].items():
                parts = (f"--model=benchmarks.own_models:{name}", f"--dataset=benchmarks.own_models:{data}")
                more = (*parts, f"--global-batch={BATCH}", setting)
                run = bench.up(
                    f"{name}-{turn}-{len(setting)}",
                    "--workers=0",
                    steps=bench.steps(STEPS),
                    overrides=more,
                    STANDBY="0",
                )
                samples.append(step_seconds([row for row in run.rows("chief") if row.get("loss") is not None]))
                summary = run.load_summary()
                hashes.setdefault((name, setting), set()).add(str(summary and summary.weights_sha256))
    if varied := [f"{name} {setting}" for (name, setting), found in hashes.items() if len(found) > 1]:
        raise RunFailed(f"other bits in another run: {', '.join(varied)}")
    figures = [
        Figure(
            f"own-models-{name}",
            f"seconds of a step of a user's model ({name}), chief alone, without oneDNN over the default",
            "s a step",
            samples,
            ratios(samples[OFF], samples[AUTO]),
            "times",
        )
        for name, samples in seconds.items()
    ]
    means = [_geometric_mean([figure.ratios[at] for figure in figures]) for at in range(len(figures[0].ratios))]
    title = "speed of six users' models with the default, over oneDNN off (geometric mean)"
    return [
        Figure("own-models", title, "times", {"default": means}, means, "times", Goal(1.5, at_least=True)),
        *figures,
    ]


def _geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


# The user's side


def _split(shape: tuple[int, ...], examples: int = 1024) -> dict[str, Any]:
    random = np.random.default_rng(0)
    drawn = random.normal(size=(examples, *shape)).astype("float32"), random.integers(0, 10, examples)
    return {"train": drawn, "test": (drawn[0][:64], np.arange(64) % 10)}


def images() -> dict[str, Any]:
    """Return random images `[N, 32, 32, 3] float32` of ten classes."""
    return _split((32, 32, 3))


def series() -> dict[str, Any]:
    """Return random series `[N, 64, 32] float32` of ten classes."""
    return _split((64, 32))


def rows() -> dict[str, Any]:
    """Return random rows `[N, 256] float32` of ten classes."""
    return _split((256,))


def cnn(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a CNN with batch normalization and pooling."""
    from tensorflow.keras import Input, Sequential, layers

    def block(filters: int) -> list[Any]:
        convolution = layers.Conv2D(filters, 3, padding="same", use_bias=False)
        return [convolution, layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]

    return Sequential([Input(shape), *block(32), *block(64), *block(128), layers.Flatten(), layers.Dense(outputs)])


def unet(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a small U-Net with a classifier on top."""
    from tensorflow.keras import Input, Model, layers

    inputs = Input(shape)
    high = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    low = layers.Conv2D(32, 3, padding="same", activation="relu")(layers.MaxPooling2D()(high))
    up = layers.Conv2DTranspose(16, 2, strides=2, padding="same")(low)
    joined = layers.Conv2D(16, 3, padding="same", activation="relu")(layers.concatenate([high, up]))
    return Model(inputs, layers.Dense(outputs)(layers.GlobalAveragePooling2D()(joined)))


def separable(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a CNN of depthwise separable convolutions, as in MobileNet."""
    from tensorflow.keras import Input, Sequential, layers

    def block(filters: int) -> list[Any]:
        return [layers.SeparableConv2D(filters, 3, padding="same", activation="relu"), layers.AveragePooling2D(2)]

    first = layers.Conv2D(16, 3, padding="same", activation="relu")
    return Sequential([Input(shape), first, *block(32), *block(64), layers.Flatten(), layers.Dense(outputs)])


def transformer(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a model with two blocks of attention over a series."""
    from tensorflow.keras import Input, Model, layers

    inputs = Input(shape)
    hidden = layers.Dense(64)(inputs)
    for _ in range(2):
        hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(4, 16)(hidden, hidden))
        hidden = layers.LayerNormalization()(hidden + layers.Dense(64)(layers.Dense(128, "gelu")(hidden)))
    return Model(inputs, layers.Dense(outputs)(layers.GlobalAveragePooling1D()(hidden)))


def waiting(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a layer whose step waits for 50 ms without using a processor, as it would for a GPU."""
    import tensorflow as tf
    from tensorflow.keras import Input, Sequential, layers

    def wait() -> Any:
        time.sleep(0.05)
        return np.float32(0)

    def delay(inputs: Any) -> Any:
        return inputs + tf.stop_gradient(tf.ensure_shape(tf.numpy_function(wait, [], tf.float32), []))

    return Sequential([Input(shape), layers.Lambda(delay, output_shape=shape), layers.Dense(outputs)])


def recurrent(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a model with an LSTM over a series."""
    from tensorflow.keras import Input, Sequential, layers

    return Sequential([Input(shape), layers.LSTM(64), layers.Dense(outputs)])


def dense(shape: tuple[int, ...], outputs: int) -> Any:
    """Return a multilayer perceptron."""
    from tensorflow.keras import Input, Sequential, layers

    return Sequential([Input(shape), *[layers.Dense(512, "relu") for _ in range(3)], layers.Dense(outputs)])
