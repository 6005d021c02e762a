"""TensorFlow's tutorial "Multi-worker training with Keras", on the data and the model of our runs.

Source: https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras. With TF_CONFIG it is one of several
workers, and needs TF_USE_LEGACY_KERAS=1; otherwise it trains alone.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from benchmarks.baselines.cnn import create_model, create_strategy
from benchmarks.baselines.common import EVERY, log_step, parser, train_arrays


class LogSteps(tf.keras.callbacks.Callback):
    """Logs the steps, and ends the training after the last."""

    def __init__(self, steps: int, done: int = 0) -> None:
        super().__init__()
        self._steps = steps
        self._done = self._step = done

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        if self._step >= self._steps:
            return
        self._step = self._done + batch + 1
        log_step(self._step, self._steps)
        self.model.stop_training = self._step >= self._steps


def build_and_compile_cnn_model(learning_rate: float, **options: object) -> tf.keras.Model:
    """Return the two-conv CNN, ready to fit; `options` are those of `compile`."""
    model = create_model()
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=learning_rate),
        metrics=["accuracy"],
        **options,
    )
    return model


def main() -> None:
    """Train."""
    arguments = parser()
    arguments.add_argument("--steps-per-execution", type=int, choices=(1, EVERY), default=1, help="of compile")
    arguments.add_argument(
        "--no-jit", action="store_true", help="compile without XLA, which Keras 3 turns on by itself"
    )
    options = arguments.parse_args()
    strategy = create_strategy(options.threads)

    train_images, train_labels = train_arrays(options.arrays)
    train_dataset = (
        tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(len(train_images))
        .repeat()
        .batch(options.global_batch)
        .prefetch(tf.data.AUTOTUNE)
    )
    compile_options = {"jit_compile": False} if options.no_jit else {}
    with strategy.scope():
        model = build_and_compile_cnn_model(
            options.learning_rate, steps_per_execution=options.steps_per_execution, **compile_options
        )
    model.fit(train_dataset, steps_per_epoch=options.steps, verbose=0, callbacks=[LogSteps(options.steps)])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # servers whose peers end at the same moment may hang in their teardown
