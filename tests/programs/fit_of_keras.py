"""What `Model.fit` of Keras 3 gives on the tasks of the cluster that TF_CONFIG names, or in one process without it."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.measured import await_other_task
from train import patches

EXAMPLES, FEATURES, BATCH = 40, 4, 8
random = np.random.default_rng(0)
X = random.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
Y = random.integers(0, 3, EXAMPLES)
WEIGHTS = random.uniform(0, 2, EXAMPLES).astype(np.float32)
SIGNATURE = tf.TensorSpec((FEATURES,)), tf.TensorSpec((), tf.int64)
"""Of an example."""

OVERFLOWS = np.ones(EXAMPLES, np.float32)
OVERFLOWS[BATCH - 1] = 1e36  # of the second task's part of the first batch, times the first scale


def scaling() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))


class Interrupted(Exception):
    """In place of a kill."""


class Interrupt(keras.callbacks.Callback):
    """Ends a training before an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            raise Interrupted


class Count(keras.metrics.SparseCategoricalAccuracy):
    """Counts examples; its result is a variable, as that of the metric in Keras's guide."""

    def result(self) -> Any:
        return self.count


def new_model(optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.05), **options: Any) -> keras.Model:
    """Return a compiled model with what replicas could disagree on."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    hidden = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(momentum=0.5, synchronized=True)]
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"], jit_compile=False,
        **options,
    )  # fmt: skip
    return model


def weights(model: keras.Model) -> list[Any]:
    return [weight.tolist() for weight in model.get_weights()]


def data(*more: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y, *more)).batch(BATCH)


def linear(scope: Callable[[], Any], inputs: int, outputs: int, loss: Any, rate: float = 0.01) -> Any:
    with scope():
        dense = keras.layers.Dense(outputs, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((inputs,)), dense])
        model.compile(keras.optimizers.SGD(rate), loss, jit_compile=False)
    return model


def kept(scope: Callable[[], Any]) -> bool:
    """Return whether an array stays as it is whose parts, at multiples of 64 bytes, a generator yields as labels."""
    memory = np.empty(X.nbytes + 64, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][: X.nbytes].view(np.float32).reshape(X.shape)
    array[:] = X
    parts = ((array[at : at + BATCH],) * 2 for at in range(0, EXAMPLES, BATCH))
    linear(scope, FEATURES, FEATURES, "mae").fit(parts, verbose=0)
    return bool((array == X).all())


def visits(scope: Callable[[], Any]) -> list[float]:
    """Return how often each example counts in an epoch of arrays that `fit` shuffles without a seed."""
    tf.random.set_seed(None)
    model = linear(scope, EXAMPLES, 1, lambda _, outputs: -outputs, float(BATCH))
    model.fit(np.eye(EXAMPLES, dtype=np.float32), np.zeros(EXAMPLES), BATCH, verbose=0)
    return [float(weight) for weight in model.get_weights()[0][:, 0]]


def mean_over_batch(labels: Any, outputs: Any) -> Any:
    return keras.ops.mean((outputs - labels) ** 2)


def with_loss(scope: Callable[[], Any], loss: Any) -> list[float]:
    """Return the loss and the weights after an epoch."""
    model = linear(scope, FEATURES, 1, loss)
    history = model.fit(X, X[:, :1], BATCH, shuffle=False, verbose=0).history
    return [*history["loss"], *model.get_weights()[0][:, 0].tolist()]


def unshared(*, longer: bool) -> tf.data.Dataset:
    """Return a dataset that tasks do not share; with `longer`, that of the first task has more batches."""
    first = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0) == 0
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data().take(5 if first or not longer else 3).with_options(options)


def trained(scope: Callable[[], Any], *arguments: Any, compiled: dict[str, Any] | None = None, **options: Any) -> Any:
    with scope():
        model = new_model(**(compiled or {}))
    if options.pop("outside", False):
        metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy"), Count(name="count")]
        model.compile(keras.optimizers.Adam(0.05), model.loss, metrics=metrics, jit_compile=False)
    history = model.fit(*arguments, verbose=0, **options)
    found = {"history": history.history, "epochs": history.epoch, "weights": weights(model)}
    return found | {"later": model.fit(*arguments, verbose=0).epoch if "callbacks" in options else []}


def error_in_fit(scope: Callable[[], Any], **compiled: Any) -> str:
    """Return how a training fails."""
    try:
        trained(scope, data(), compiled=compiled)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_callbacks(scope: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """Return the results of a training with the usual callbacks, and the files that this task wrote."""
    saved: list[str] = []
    for name in ("save", "save_weights"):
        original = getattr(keras.Model, name)

        def recorded(model: Any, filepath: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            saved.append(str(filepath))
            return original(model, filepath, *args, **options)

        setattr(keras.Model, name, recorded)

    def usual() -> list[keras.callbacks.Callback]:
        of = keras.callbacks
        return [
            of.BackupAndRestore(folder / "backup"),
            of.ModelCheckpoint(str(folder / "best.keras"), monitor="val_loss", save_best_only=True),
            of.ModelCheckpoint(str(folder / "epoch-{epoch}.weights.h5"), save_weights_only=True),
            of.TensorBoard(str(folder / "events"), write_graph=False),
            of.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch)),
            of.EarlyStopping(monitor="val_loss", patience=10),
        ]

    options = {"epochs": 4, "validation_data": data()}
    whole = trained(scope, data(), callbacks=usual(), **options)
    left = sorted(path.name for path in folder.iterdir())
    folder = folder / "interrupted"
    with contextlib.suppress(Interrupted):
        trained(scope, data(), callbacks=[*usual(), Interrupt(2)], **options)
    resumed = trained(scope, data(), callbacks=usual(), **options)
    shared = [path for path in saved if path.startswith(str(folder.parent))]
    return {"whole": whole, "left": left, "resumed": resumed, "saved": len(saved), "shared": shared}


def drawn(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Return the mask that this task's replica draws, and its numbers without a seed in two steps."""
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=1)
    mask = strategy.run(lambda: dropout(tf.ones([64]), training=True)).numpy().tolist()
    draw = tf.function(lambda: strategy.run(lambda: keras.random.normal([4])))
    return {"drawn": mask, "unseeded": [draw().numpy().tolist() for _ in range(2)]}


def averages(strategy: tf.distribute.Strategy) -> list[float]:
    """Return BatchNormalization's moving mean after a step of 0 and 1, and after one of no example and 0."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        layer.build((None, 1))

    @tf.function
    def update(least: tf.Tensor) -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return layer(tf.fill([least + replica, 1], tf.cast(least * replica, tf.float32)), training=True)

    found = []
    for least in (1, 0):
        strategy.run(update, args=(tf.constant(least),))
        found.append(float(layer.moving_mean.numpy()[0]))
    return found


class Autoencoder(keras.Model):
    """As keras.io's VAE: two models and a `train_step`, no `call`."""

    def __init__(self, *, built: bool = True) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        inputs = [keras.Input((FEATURES,))] if built else []
        self.encoder = keras.Sequential([*inputs, keras.layers.Dense(2)])
        self.decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(FEATURES)])
        self.tracker = keras.metrics.Sum(name="loss")

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.decoder(self.encoder(data)) - data) ** 2) / BATCH
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def without_call(scope: Callable[[], Any], *, built: bool = True) -> Any:
    """Return the weights of a model without `call` after a training, or how that fails."""
    with scope():
        model = Autoencoder(built=built)
        model.compile(keras.optimizers.SGD(0.05))
    try:
        model.fit(tf.data.Dataset.from_tensor_slices(X).batch(BATCH), epochs=2, verbose=0)
    except ValueError as error:
        return str(error)
    return weights(model)


def main(result: Path) -> None:
    several = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    scope = strategy.scope if several else tf.init_scope
    tf.config.experimental.enable_op_determinism()
    found: dict[str, Any] = {"error": error_in_fit(scope)} if several else {}
    found["replaced"] = patches.apply(patches.SCRIPTS)
    found["again"] = patches.apply(patches.SCRIPTS)
    folder = result.parent / ("several" if several else "one")
    (folder / "interrupted").mkdir(parents=True, exist_ok=True)
    found |= {
        "callbacks": with_callbacks(scope, folder),
        "sample_weights": trained(scope, data(WEIGHTS), epochs=2),
        "clipped": trained(scope, data(), compiled={"optimizer": lambda: keras.optimizers.SGD(1.0, clipnorm=0.01)}),
        "outside": trained(scope, data(), outside=True, epochs=2, validation_data=data()),
        "scaled": trained(scope, data(OVERFLOWS), compiled={"optimizer": scaling}),
        "execution": trained(scope, data(WEIGHTS), epochs=2, compiled={"steps_per_execution": 2}),
        "class_weights": trained(scope, X, Y, batch_size=BATCH, shuffle=False, class_weight={0: 0.5, 1: 1.0, 2: 2.0}),
    }
    with scope():
        model = new_model()
    found["numbers"] = [float(model.optimizer.learning_rate), int(model.optimizer.iterations)]
    found["without_call"] = without_call(scope)
    found["evaluate"] = model.evaluate(data(), verbose=0)
    found["generated"] = model.evaluate((X[at : at + BATCH], Y[at : at + BATCH]) for at in range(0, EXAMPLES, BATCH))
    streamed = tf.data.Dataset.from_generator(iter([*zip(X, Y, strict=True)]).__iter__, output_signature=SIGNATURE)
    found["streamed"] = model.evaluate(streamed.batch(BATCH), verbose=0)
    found["none"] = model.evaluate(data().map(lambda features, labels: (features, labels, None)), verbose=0)
    yielded = ((X[at : at + BATCH], Y[at : at + BATCH], None) for at in range(0, EXAMPLES, BATCH))
    found["yielded"] = model.evaluate(yielded, verbose=0)
    found |= {"kept": kept(scope), "number": with_loss(scope, mean_over_batch)}
    found["unreduced"] = with_loss(scope, keras.losses.MeanSquaredError(reduction=None))
    found["unshared"] = model.evaluate(unshared(longer=False), verbose=0)
    found["longer"] = trained(scope, unshared(longer=True), epochs=2)
    found["counted"] = trained(scope, unshared(longer=False), epochs=3, steps_per_epoch=5)
    found["predict"] = model.predict(tf.data.Dataset.from_tensor_slices(X).batch(BATCH), verbose=0).tolist()
    if several:
        for option in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
            inner = functools.partial(keras.optimizers.SGD, 0.05, use_ema=True, **{option: 2})
            scaled = functools.partial(lambda inner: keras.optimizers.LossScaleOptimizer(inner()), inner)
            found[option] = [error_in_fit(scope, optimizer=optimizer) for optimizer in (inner, scaled)]
            with scope():
                found["evaluated"] = new_model(inner).evaluate(data(), verbose=0)
        found["unbuilt"] = without_call(scope, built=False)
        found |= {**drawn(strategy), "averages": averages(strategy), "visits": visits(scope)}
    result.write_text(json.dumps(found))
    if several:
        await_other_task(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # TensorFlow waits here for the other task
