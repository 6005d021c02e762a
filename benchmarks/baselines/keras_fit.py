"""TensorFlow's tutorial "Multi-worker training with Keras", on the data and the model of our runs.

Source: https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras. With TF_CONFIG it is one of several
workers, and needs TF_USE_LEGACY_KERAS=1; without it trains alone.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from benchmarks.baselines.cnn import create_model, create_strategy
from benchmarks.baselines.common import arguments, log_step, train_arrays


class LogSteps(tf.keras.callbacks.Callback):
    """Logs the steps, and ends the training after the last."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self._step = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        if self._step == self._steps:
            return
        self._step += 1
        log_step(self._step, self._steps)
        self.model.stop_training = self._step == self._steps


def build_and_compile_cnn_model(learning_rate: float) -> tf.keras.Model:
    """Return the two-conv CNN, ready to fit."""
    model = create_model()
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=learning_rate),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Train."""
    options = arguments()
    strategy = create_strategy(options.threads)

    train_images, train_labels = train_arrays(options.arrays)
    train_dataset = (
        tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(len(train_images))
        .repeat()
        .batch(options.global_batch)
    )
    with strategy.scope():
        model = build_and_compile_cnn_model(options.learning_rate)
    model.fit(train_dataset, steps_per_epoch=options.steps, verbose=0, callbacks=[LogSteps(options.steps)])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # servers whose peers end at the same moment may hang in their teardown
